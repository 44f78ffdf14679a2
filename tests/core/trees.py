"""Trees of a forest, and a check of lookahead trees."""

import numpy as np

from pilotfish.core.trees.tree import Forest, TokenTree


def check_tree(nodes: TokenTree) -> None:
    """Parents before children, depths right, scores falling, siblings of different tokens."""
    above = np.append(nodes.scores, 0.0)[nodes.parents]
    assert (nodes.parents < np.arange(len(nodes))).all() and (nodes.parents >= -1).all()
    assert (nodes.depths == np.append(nodes.depths, 0)[nodes.parents] + 1).all()
    assert (nodes.scores <= above).all()
    assert len(set(zip(nodes.parents.tolist(), nodes.tokens.tolist(), strict=True))) == len(nodes)


def trees_of(forest: Forest) -> list[TokenTree]:
    return [forest.nodes.take(np.flatnonzero(forest.owners == tree)) for tree in range(forest.num_trees)]
