"""Token trees: what a draft proposes and a target verifies.

root ─┬─ def ─┬─ main      The root is the last committed token; it is node 0.
      │       └─ test      A node's path is the tokens from below the root down to the node.
      └─ class             A node's score is the log-probability that its path is accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

ROOT = 0
#: Origins: who guessed a node. Of drafts elsewhere it is the pool's name.
LM, NGRAM, SUFFIX, OTHER = "lm", "ngram", "suffix", "other"


class TokenTree:
    """A tree of guessed tokens below the last committed token.

    Nodes are numbered in order of insertion, so a parent's number is below its children's. Scores
    never rise along a path, hence the best n nodes by score always form a connected subtree. Origins are for
    figures alone.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = [-1]  # the root's token is known to the request, not to the tree
        self.parents: list[int] = [-1]
        self.depths: list[int] = [0]
        self.scores: list[float] = [0.0]
        self.origins: list[str] = [OTHER]
        self._children: list[dict[int, int]] = [{}]

    def __len__(self) -> int:
        """Nodes without the root."""
        return len(self.tokens) - 1

    def nodes(self) -> Iterator[int]:
        """Node numbers without the root, parents first."""
        return iter(range(1, len(self.tokens)))

    def add(self, parent: int, token: int, score: float, origin: str = OTHER) -> int:
        """Add (or find) the child of `parent` that carries `token`; return its number.

        A score above the parent's is cut to it. A child that is there already keeps its origin and its score:
        raising it could lift it over nodes that were chosen before it.
        """
        found = self._children[parent].get(token)
        if found is not None:
            return found
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.scores.append(min(score, self.scores[parent]))
        self.origins.append(origin)
        self._children.append({})
        self._children[parent][token] = node
        return node

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that carries `token`, if there is one."""
        return self._children[node].get(token)

    def children(self, node: int) -> Sequence[int]:
        """Children of `node` in order of insertion."""
        return tuple(self._children[node].values())

    def path(self, node: int) -> list[int]:
        """Nodes from below the root down to `node`, both included; empty for the root."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        path.reverse()
        return path

    def path_tokens(self, node: int) -> list[int]:
        """Tokens along `path`."""
        return [self.tokens[n] for n in self.path(node)]

    def best(self, count: int) -> TokenTree:
        """The subtree of the `count` nodes of highest score, ties to the older node."""
        order = np.argsort(-np.array(self.scores[1:]), kind="stable")
        return self.subtree(np.sort(order[:count] + 1).tolist())

    def subtree(self, nodes: Sequence[int]) -> TokenTree:
        """The tree of `nodes`, ascending and closed under parents, renumbered in that order."""
        tree, number = TokenTree(), {ROOT: ROOT}
        for node in nodes:
            parent = number[self.parents[node]]
            number[node] = tree.add(parent, self.tokens[node], self.scores[node], self.origins[node])
        return tree

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """Nodes along `tokens` from the root, as far as the tree goes."""
        nodes: list[int] = []
        for token in tokens:
            child = self.child(nodes[-1] if nodes else ROOT, token)
            if child is None:
                break
            nodes.append(child)
        return nodes

    def merge(self, other: TokenTree) -> None:
        """Add every node of `other`; a path that both have keeps this tree's scores and origins."""
        number = {ROOT: ROOT}
        for node in other.nodes():
            parent = number[other.parents[node]]
            number[node] = self.add(parent, other.tokens[node], other.scores[node], other.origins[node])


def walk(tree: TokenTree, sampled: Sequence[int | None]) -> list[int]:
    """Verify a tree: the committed tokens, the accepted path's and then the bonus token.

    `sampled[i]` is the target's own token after node i (i = 0: after the root). Nothing about the draft
    enters, so whatever the tree holds, the result is what the target alone would have produced. The walk ends
    before a node that has None: the target could sample nothing there, as the next step will find at its root.
    """
    tokens: list[int] = []
    node: int | None = ROOT
    while node is not None and (token := sampled[node]) is not None:
        tokens.append(token)
        node = tree.child(node, token)
    return tokens
