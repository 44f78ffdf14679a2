"""Trees that grow while the target verifies: wide, long-lived, re-rooted on every commit.

        tokens committed: def            then: def add            "add" was in the tree: a hit

    root ─┬─ add ─┬─ (     ─── a              root ─┬─ (  ─── a
          │       └─ _     ─── b      ──►           └─ _  ─── b
          └─ sub ─── (                                              sub and below are gone

Both sides hold one of each sequence: the draft the one it grows (`Lookahead`), the target a copy of the nodes that were
pushed (`TreeCopy`). A sequence has thousands of nodes, so they are in arrays, in order of arrival: parents come first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pilotfish.core.messages import PushedNodes
from pilotfish.core.tree import LM, OTHER, ROOT, Floats, Ints, TokenTree

#: Of a node that was not expanded: it has no KV.
NO_SLOT = -1
#: Up to so many open nodes are sorted whole, and paths walked one by one: array operations over all would take longer.
FEW_LEAVES, FEW_PATHS = 64, 16
#: Of a pushed node's parent that is not in the tree: never was, or is gone.
UNKNOWN = -2
#: What a pushed score is raised to: of no use, and sums of many stay numbers.
LEAST = -1000.0


@dataclass(frozen=True, eq=False)
class GrownTree(TokenTree):
    """A tree that a draft grows, or a target's copy of it."""

    ids: Ints  # [n], rising
    slots: Ints  # [n], of the draft's KV, or NO_SLOT

    @classmethod
    def empty(cls) -> GrownTree:
        return _EMPTY


_EMPTY = GrownTree(**vars(TokenTree.empty()), ids=np.zeros(0, np.int64), slots=np.zeros(0, np.int64))


@dataclass(frozen=True)
class RerootResult:
    """The effect of a commit on a tree."""

    hit: bool  # every committed token was in it
    accepted: int  # nodes that the committed tokens are
    path_slots: list[int]  # KV of the committed tokens that were expanded, from the first on without a gap
    freed: list[int]  # slots of nodes that are gone


class Lookahead:
    """The draft's tree of one sequence. Its root is expanded before anything else; a node once."""

    #: Log-chance below which a node is not kept: one path in ten thousand.
    FLOOR = -9.2

    def __init__(self) -> None:
        self.nodes = GrownTree.empty()
        self._next_id = 1

    def __len__(self) -> int:
        return len(self.nodes)

    def leaves(self, count: int, max_depth: int) -> Ints:
        """The `count` likeliest nodes to expand next, likeliest first: none twice, none as deep as `max_depth`."""
        nodes = self.nodes
        open_nodes = np.flatnonzero((nodes.slots == NO_SLOT) & (nodes.depths < max_depth))
        costs = -nodes.scores[open_nodes]
        if len(open_nodes) > max(count, FEW_LEAVES):
            chosen = np.sort(np.argpartition(costs, count - 1)[:count])
            open_nodes, costs = open_nodes[chosen], costs[chosen]
        return open_nodes[costs.argsort(kind="stable")[:count]]

    def expand(self, leaves: Ints, slots: NDArray[np.integer]) -> None:
        """The nodes at these indices have KV in these slots now. [n] each"""
        self.nodes.slots[leaves] = slots

    def paths(self, leaves: Ints) -> NDArray[np.int32]:
        """Slots from below the root down to each leaf, all of them expanded. [leaves, deepest], 0 beyond"""
        nodes = self.nodes
        if len(leaves) > FEW_PATHS:
            return nodes.along_paths(nodes.slots.astype(np.int32), leaves)
        paths = np.zeros((len(leaves), int(nodes.depths[leaves].max(initial=0))), np.int32)
        for row, leaf in enumerate(leaves.tolist()):
            path = nodes.path(leaf)
            paths[row, : len(path)] = nodes.slots[path]
        return paths

    def add(self, parents: Ints, tokens: Ints, log_chances: Floats) -> GrownTree:
        """Children [n] of the root and of nodes, each with its chance given the parent; those kept."""
        scores = np.minimum(log_chances, 0.0)
        depths = np.ones(len(parents), np.int64)
        if len(self.nodes):
            below_nodes = parents != ROOT
            scores += np.where(below_nodes, self.nodes.scores[parents], 0.0)
            depths += np.where(below_nodes, self.nodes.depths[parents], 0)
        kept = np.flatnonzero(scores > self.FLOOR)
        count = len(kept)
        ids = np.arange(self._next_id, self._next_id + count)
        names, slots = np.full(count, LM, object), np.full(count, NO_SLOT)
        added = GrownTree(parents[kept], tokens[kept], depths[kept], scores[kept], names, ids, slots)
        self._next_id += count
        self.nodes = self.nodes.extended(added) if len(self.nodes) else added
        return added

    def commit(self, tokens: Sequence[int]) -> RerootResult:
        """Re-root at the last of `tokens`, or at nothing known."""
        nodes = self.nodes
        path = nodes.follow(tokens)
        hit = len(path) == len(tokens)
        expanded = nodes.slots != NO_SLOT
        path_slots: list[int] = nodes.slots[path][expanded[path]].tolist()  # only the last may lack one
        expanded[path] = False
        if hit and len(path_slots) == len(path):
            below = nodes.below(path[-1])
            self.nodes, freed = nodes.rerooted(path[-1], below), nodes.slots[expanded & ~below]
        else:
            self.nodes, freed = GrownTree.empty(), nodes.slots[expanded]
        return RerootResult(hit, len(path), path_slots, freed.tolist())

    def drop(self) -> list[int]:
        """Forget every node; the slots that are free now."""
        slots: list[int] = self.nodes.slots[self.nodes.slots != NO_SLOT].tolist()
        self.nodes = GrownTree.empty()
        return slots


class TreeCopy:
    """The target's copy. Whatever is pushed, it stays a tree below the last committed token, of `max_nodes` at most.

    A push whose base_len is older than the target's is the normal case: its nodes were on their way while the target
    committed. They are walked along what was committed since, and what hangs below the new root stays:

        pushed below base_len 4:   0 ─── 17 ─┬─ 20        committed since: the token of 17
                                             └─ 21        kept: 20 and 21, below the root
    """

    def __init__(self, length: int, vocab_size: int, max_nodes: int) -> None:
        """Of a sequence of `length` tokens."""
        self.nodes = GrownTree.empty()
        self.dropped = 0  # nodes that broke the protocol: foreign tokens, ids that do not rise, too many
        self.breach = ""  # how the last of them did
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
        self.nodes = self.nodes.rerooted(path[-1]) if hit else GrownTree.empty()
        return hit

    def attach(self, push: PushedNodes) -> None:
        """Add what survives of `push`. Nodes that break the protocol are dropped, and counted."""
        push = self._lawful(push)
        if not len(push):
            return
        named = self._first_named(push.parents)
        self._walk_committed(push, named)
        parents = self._parents(push, named)
        known = np.flatnonzero(parents != UNKNOWN)
        if (parents >= len(self.nodes)).any() or self._repeats(push.tokens[known], parents[known]):
            self._attach_one_by_one(push, parents)
        else:
            self.late += len(push) - len(known)
            self._add(push.take(known), parents[known])

    def _lawful(self, push: PushedNodes) -> PushedNodes:
        """Without the nodes that no draft may send. The tree has room for all that are left."""
        rising = len(push) > 0 and push.ids[0] > self._last_id and bool((np.diff(push.ids) > 0).all())
        first_known = self._length - len(self._recent)
        lawful = np.full(len(push), rising and first_known <= push.base_len <= self._length)
        lawful &= (push.tokens >= 0) & (push.tokens < self._vocab_size) & ~np.isnan(push.scores)
        room = max(self._max_nodes - len(self.nodes) - len(self._aliases), 0)
        chosen = np.flatnonzero(lawful)[:room]
        if len(chosen) < len(push):
            self.dropped += len(push) - len(chosen)
            self.breach = self._breach_of(push, rising=rising, lawful=bool(lawful.all()))
        self._last_id = int(push.ids[-1]) if rising else self._last_id
        return replace(push.take(chosen), scores=np.clip(push.scores[chosen], LEAST, 0.0))

    def _breach_of(self, push: PushedNodes, *, rising: bool, lawful: bool) -> str:
        first_known = self._length - len(self._recent)
        if not rising:
            return "ids do not rise"
        if not first_known <= push.base_len <= self._length:
            return f"base_len {push.base_len} is not {first_known} to {self._length}"
        return f"more than {self._max_nodes} nodes" if lawful else "a token that is not in the vocabulary"

    def _first_named(self, ids: Ints) -> Ints:
        """`ids`, those of repeated nodes replaced by the first's."""
        if not self._aliases:
            return ids
        return np.array([self._aliases.get(node, node) for node in ids.tolist()], np.int64)

    def _walk_committed(self, push: PushedNodes, named: Ints) -> None:
        """Find the nodes of `push` whose tokens have been committed since; forget what is older than it."""
        self._recent = self._recent[len(self._recent) - (self._length - push.base_len) :]
        self._holders = {position: node for position, node in self._holders.items() if position >= push.base_len}
        if not self._recent:
            return
        rows = zip(named.tolist(), push.tokens.tolist(), push.ids.tolist(), strict=True)
        children = {(parent, token): node for parent, token, node in reversed(list(rows))}
        holder: int | None = 0
        for position, token in enumerate(self._recent, push.base_len):
            found = None if holder is None else children.get((holder, token))
            holder = self._holders.get(position, found)
            if holder is not None:
                self._holders[position] = holder

    def _parents(self, push: PushedNodes, named: Ints) -> Ints:
        """Of each node: the parent's index in the tree, ROOT, len(tree) + its index in `push`, or UNKNOWN."""
        ids = np.concatenate((self.nodes.ids, push.ids))
        parents = np.minimum(np.searchsorted(ids, named), len(ids) - 1)
        parents[ids[parents] != named] = UNKNOWN
        parents[parents >= len(self.nodes) + np.arange(len(push))] = UNKNOWN  # a parent comes first
        if push.base_len == self._length:
            parents[named == 0] = ROOT
        if (root := self._holders.get(self._length - 1)) is not None:
            parents[named == root] = ROOT
        return parents

    def _repeats(self, tokens: Ints, parents: Ints) -> bool:
        """Whether a parent would have two children with one token."""
        siblings = np.isin(self.nodes.parents, parents)
        parents = np.concatenate((self.nodes.parents[siblings], parents))
        tokens = np.concatenate((self.nodes.tokens[siblings], tokens))
        return len(np.unique((parents + 1) * self._vocab_size + tokens)) < len(tokens)

    def _attach_one_by_one(self, push: PushedNodes, parents: Ints) -> None:
        """Children of a repeated node hang below the first; those of an unknown node are dropped."""
        size, kept, above = len(self.nodes), list[int](), list[int]()
        pairs = zip(self.nodes.parents.tolist(), self.nodes.tokens.tolist(), strict=True)
        first = {pair: index for index, pair in enumerate(pairs)}
        placed: list[int] = []  # of each node of `push`: its index in the tree, or UNKNOWN
        repeats: dict[int, int] = {}  # row of a repeated node: the first's index
        for row, (parent, token) in enumerate(zip(parents.tolist(), push.tokens.tolist(), strict=True)):
            parent = parent if parent < size else placed[parent - size]
            place = UNKNOWN if parent == UNKNOWN else first.setdefault((parent, token), size + len(kept))
            placed.append(place)
            if place == size + len(kept):
                kept.append(row)
                above.append(parent)
            elif place != UNKNOWN:
                repeats[row] = place
        self._add(push.take(np.array(kept, np.int64)), np.array(above, np.int64))
        self._alias(push, repeats)
        self.late += placed.count(UNKNOWN)

    def _alias(self, push: PushedNodes, repeats: Mapping[int, int]) -> None:
        """Remember the repeated nodes; forget those whose first is gone."""
        self.repeated += len(repeats)
        self._aliases |= {int(push.ids[row]): int(self.nodes.ids[first]) for row, first in repeats.items()}
        named = {*self.nodes.ids.tolist(), *self._holders.values()}
        self._aliases = {node: first for node, first in self._aliases.items() if first in named}

    def _add(self, push: PushedNodes, parents: Ints) -> None:
        """Nodes below `parents`: indices of nodes in the tree, ROOT, or len(tree) + those of nodes before."""
        size = len(self.nodes)
        depths = np.concatenate((self.nodes.depths, np.zeros(len(push) + 1, np.int64)))  # the last: the root's
        scores = np.concatenate((self.nodes.scores, push.scores, [0.0]))
        outside = np.flatnonzero(parents < size)
        depths[size + outside] = depths[parents[outside]] + 1
        scores[size + outside] += scores[parents[outside]]
        for row in np.flatnonzero(parents >= size).tolist():
            depths[size + row] = depths[parents[row]] + 1
            scores[size + row] += scores[parents[row]]
        new = slice(size, size + len(push))
        names, slots = np.full(len(push), OTHER, object), np.full(len(push), NO_SLOT)
        added = GrownTree(parents, push.tokens, depths[new], scores[new], names, push.ids, slots)
        self.nodes = self.nodes.extended(added)
