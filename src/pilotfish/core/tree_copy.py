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
            self._attach_unrepeated(push.take(alive), self._compressed(parents, alive))
        else:
            self._attach_together(push.take(alive), self._compressed(parents, alive))

    def _lawful(self, push: Push) -> Push:
        """Without the nodes that no draft may send. The tree has room for all that are left."""
        rising = len(push) > 0 and push.ids[0] > self._last_id and bool((np.diff(push.ids) > 0).all())
        first_known = self._length - len(self._recent)
        lawful = np.full(len(push), rising and first_known <= push.base_len <= self._length)
        lawful &= push.tokens < self._vocab_size
        room = max(0, self._max_nodes - len(self.nodes) - len(self._aliases))
        chosen = np.flatnonzero(lawful)[:room]
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
        """Whose ancestors are all known. Doubles the distance looked back each time."""
        alive = np.append(parents != UNKNOWN, True)  # the last: whatever is in the tree
        jumps = np.append(np.maximum(parents - len(self.nodes), ROOT), ROOT)
        while (jumps >= 0).any():
            alive &= alive[jumps]
            jumps = jumps[jumps]
        return np.asarray(alive[:-1])

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
        """Nodes of which none repeats another. [n] indices of their parents."""
        depths, scores = self._settled(push, parents)
        added = Nodes(push.ids, parents, push.tokens, depths, scores, np.full(len(push), NO_SLOT))
        self.nodes = self.nodes.with_more(added)

    def _settled(self, push: Push, parents: Ints) -> tuple[Ints, Floats]:
        """Depths and scores in the tree: of one level at once, of several in one pass, for parents come first."""
        size = len(self.nodes)
        if (parents < size).all():
            return np.append(self.nodes.depths, 0)[parents] + 1, np.append(self.nodes.scores, 0.0)[parents] + push.scores
        depths, scores = self.nodes.depths.tolist(), self.nodes.scores.tolist()
        for parent, score in zip(parents.tolist(), push.scores.tolist(), strict=True):
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
            scores.append(scores[parent] + score if parent >= 0 else score)
        return np.array(depths[size:], np.int64), np.array(scores[size:], np.float64)

    def _attach_unrepeated(self, push: Push, parents: Ints) -> None:
        """The same where nodes are repeated: what hangs below a repeated node hangs below the first."""
        size = len(self.nodes)
        siblings = zip(self.nodes.parents.tolist(), self.nodes.tokens.tolist(), strict=True)
        firsts = {parent_and_token: index for index, parent_and_token in enumerate(siblings)}
        indices: list[int] = []  # in the tree, of each pushed node or of the one that it repeats
        kept: list[int] = []
        above: list[int] = []
        for row, (parent, token) in enumerate(zip(parents.tolist(), push.tokens.tolist(), strict=True)):
            parent = indices[parent - size] if parent >= size else parent
            index = firsts.setdefault((parent, token), size + len(kept))
            indices.append(index)
            if index == size + len(kept):
                kept.append(row)
                above.append(parent)
            else:
                first = self.nodes.ids[index] if index < size else push.ids[kept[index - size]]
                self._aliases[int(push.ids[row])] = int(first)
                self.repeated += 1
        self._attach_together(push.take(np.array(kept, np.int64)), np.array(above, np.int64))
