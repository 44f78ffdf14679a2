"""The target's copy of a tree that a draft grows elsewhere.

A push whose base_len is older than the target's is the normal case: its nodes were on their way while the target
committed. They are walked along what was committed since, and what hangs below the new root stays:

    pushed below base_len 4:   0 ─── 17 ─┬─ 20        committed since: the token of 17
                                         └─ 21        kept: 20 and 21, below the root
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pilotfish.core.lookahead import NO_SLOT, Floats, Ints, Nodes

#: Of a parent that is not in the tree: never was, or is gone.
UNKNOWN = -2
ROOT = -1


@dataclass(frozen=True)
class Push:
    """Nodes that arrived together, parents first: fields of the wire's Tree."""

    base_len: int
    ids: Ints  # [n], rising
    parents: Ints  # [n] ids; 0: the root at base_len
    tokens: Ints  # [n]
    scores: Floats  # [n], log of each token's chance given its parent's path; none above 0

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, chosen: Ints | NDArray[np.bool_]) -> Push:
        return Push(self.base_len, self.ids[chosen], self.parents[chosen], self.tokens[chosen], self.scores[chosen])


class TreeCopy:
    """Whatever is pushed, it stays a tree below the last committed token, of `max_nodes` at most."""

    def __init__(self, length: int, vocab_size: int, max_nodes: int) -> None:
        """Of a sequence of `length` tokens."""
        self.nodes = Nodes.none()
        self.dropped = 0  # nodes that broke the protocol: foreign tokens, ids that do not rise, too many
        self.repeated = 0  # nodes that were there already
        self.late = 0  # nodes that were no longer, or never, below the root
        self._length = length
        self._vocab_size = vocab_size
        self._max_nodes = max_nodes
        self._last_id = 0
        self._recent: list[int] = []  # tokens committed since the base_len of the last push
        self._holders: dict[int, int] = {}  # id of the node whose token stands at a position, for those of `_recent`
        self._aliases: dict[int, int] = {}  # of a repeated node: the id of the first

    def commit(self, tokens: Sequence[int]) -> bool:
        """`tokens` were just added to the sequence: re-root; whether all were in the tree."""
        path = self.nodes.follow(tokens)
        self._holders |= {self._length + depth: int(self.nodes.ids[index]) for depth, index in enumerate(path)}
        self._recent.extend(tokens)
        self._length += len(tokens)
        hit = len(path) == len(tokens)
        self.nodes = self.nodes.rerooted(path[-1]) if hit else Nodes.none()
        return hit

    def attach(self, push: Push) -> None:
        """Add what survives of `push`. Nodes that break the protocol are dropped, and counted."""
        push = self._lawful(push)
        if not len(push):
            return
        self._walk_committed(push)
        parents = self._parents(push)
        alive = self._alive(parents)
        self.late += len(push) - int(np.count_nonzero(alive))
        if self._repeats(push.tokens[alive], parents[alive]):
            self._attach_one_by_one(push.take(alive))
        else:
            self._attach_together(push.take(alive), self._compressed(parents, alive))

    def _lawful(self, push: Push) -> Push:
        """Without the nodes that no draft may send. The tree has room for all that are left."""
        rising = len(push) > 0 and push.ids[0] > self._last_id and bool((np.diff(push.ids) > 0).all())
        first_known = self._length - len(self._recent)
        lawful = np.full(len(push), rising and first_known <= push.base_len <= self._length)
        lawful &= push.tokens < self._vocab_size
        chosen = np.flatnonzero(lawful)[: self._max_nodes - len(self.nodes)]
        self.dropped += len(push) - len(chosen)
        self._last_id = int(push.ids[-1]) if rising else self._last_id
        return push.take(chosen)

    def _walk_committed(self, push: Push) -> None:
        """Find the nodes of `push` whose tokens have been committed since; forget what is older than it."""
        oldest = push.base_len - 1
        self._recent = self._recent[len(self._recent) - (self._length - push.base_len) :]
        self._holders = {position: node for position, node in self._holders.items() if position > oldest}
        holder: int | None = 0
        for position, token in enumerate(self._recent, push.base_len):
            known = self._holders.get(position)
            if known is None and holder is not None:
                found = np.flatnonzero((push.parents == holder) & (push.tokens == token))
                known = int(push.ids[found[0]]) if len(found) else None
                if known is not None:
                    self._holders[position] = known
            holder = known

    def _root_id(self, push: Push) -> int:
        """How `push` names the root, where it can."""
        return 0 if push.base_len == self._length else self._holders.get(self._length - 1, 0)

    def _parents(self, push: Push) -> Ints:
        """Of each node: the parent's index in the tree, ROOT, len(tree) + its index in `push`, or UNKNOWN."""
        named = push.parents
        if self._aliases:
            named = np.array([self._aliases.get(int(parent), int(parent)) for parent in named])
        ids = np.concatenate((self.nodes.ids, push.ids))
        parents = np.minimum(np.searchsorted(ids, named), len(ids) - 1)
        parents[ids[parents] != named] = UNKNOWN
        parents[parents >= len(self.nodes) + np.arange(len(push))] = UNKNOWN  # a parent comes first
        if push.base_len == self._length:
            parents[named == 0] = ROOT
        if (root := self._holders.get(self._length - 1)) is not None:
            parents[named == root] = ROOT
        return parents

    def _alive(self, parents: Ints) -> NDArray[np.bool_]:
        """Whose ancestors are all known."""
        inside, size = parents >= len(self.nodes), len(parents)
        alive = parents != UNKNOWN
        while True:
            above = np.where(inside, alive[np.clip(parents - len(self.nodes), 0, size - 1)], True)
            if (alive <= above).all():
                return np.asarray(alive)
            alive &= above

    def _compressed(self, parents: Ints, alive: NDArray[np.bool_]) -> Ints:
        """Parents of those alive, as if the others had not come."""
        number = np.cumsum(alive) - 1 + len(self.nodes)
        parents = parents[alive]
        inside = parents >= len(self.nodes)
        parents[inside] = number[parents[inside] - len(self.nodes)]
        return parents

    def _repeats(self, tokens: Ints, parents: Ints) -> bool:
        """Whether a parent would have two children with one token."""
        siblings = np.isin(self.nodes.parents, parents)
        parents = np.concatenate((self.nodes.parents[siblings], parents))
        tokens = np.concatenate((self.nodes.tokens[siblings], tokens))
        return len(np.unique((parents + 1) * self._vocab_size + tokens)) < len(tokens)

    def _attach_together(self, push: Push, parents: Ints) -> None:
        """A level's nodes in a few array operations: depths and scores settle from the top down."""
        depths = np.concatenate((self.nodes.depths, np.zeros(len(push) + 1, np.int64)))  # the last: the root's
        scores = np.concatenate((self.nodes.scores, np.zeros(len(push) + 1)))
        new = slice(len(self.nodes), len(self.nodes) + len(push))
        while not np.array_equal(depths[new], below := depths[parents] + 1):
            depths[new], scores[new] = below, scores[parents] + push.scores
        scores[new] = scores[parents] + push.scores
        slots = np.full(len(push), NO_SLOT)
        added = Nodes(push.ids, parents, push.tokens, depths[new], scores[new], slots)
        self.nodes = self.nodes.with_more(added)

    def _attach_one_by_one(self, push: Push) -> None:
        """The same where nodes are repeated: what hangs below a repeated node hangs below the first."""
        for row in range(len(push)):
            one = push.take(np.array([row]))
            parent = int(self._parents(one)[0])
            first = self.nodes.child(parent, int(one.tokens[0]))
            if first is None:
                self._attach_together(one, np.array([parent]))
            else:
                self._aliases[int(one.ids[0])] = int(self.nodes.ids[first])
                self.repeated += 1
