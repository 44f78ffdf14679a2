"""Trees of a forest, and a check of lookahead trees."""

from __future__ import annotations

import numpy as np

from pilotfish.core.lookahead import GrownTree
from pilotfish.core.tree import Forest, TokenTree

#: More nodes than any tree has.
WHOLE = 1 << 20


def check_tree(nodes: TokenTree) -> None:
    """Parents before children, depths right, ids rising, scores falling, siblings of different tokens."""
    above = np.append(nodes.scores, 0.0)[nodes.parents]
    assert (nodes.parents < np.arange(len(nodes))).all() and (nodes.parents >= -1).all()
    assert (nodes.depths == np.append(nodes.depths, 0)[nodes.parents] + 1).all()
    assert not isinstance(nodes, GrownTree) or (np.diff(nodes.ids) > 0).all()
    assert (nodes.scores <= above).all()
    assert len(set(zip(nodes.parents.tolist(), nodes.tokens.tolist(), strict=True))) == len(nodes)


def trees_of(forest: Forest) -> list[TokenTree]:
    return [forest.nodes.take(np.flatnonzero(forest.owners == tree)) for tree in range(forest.num_trees)]
