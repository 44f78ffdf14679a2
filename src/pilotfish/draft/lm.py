"""A causal LM that grows a token tree best-first, one forward a level for all requests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pilotfish.core.calibration import SecondsBySize
from pilotfish.core.drafter import DraftLimits
from pilotfish.core.executor import NO_NODES, NO_SAMPLING, Executor, NodeRows, Sampling, SequenceRows
from pilotfish.core.logit_rules import LogitEdits
from pilotfish.core.request import Request
from pilotfish.core.slots import SlotPool
from pilotfish.core.tree import LM, ROOT, Floats, Ints, TokenTree, TreeBuilder
from pilotfish.core.vocabulary import readable

#: Rows of a prompt that one forward takes.
CHUNK = 256


@dataclass(frozen=True)
class TreeShape:
    """How a tree is grown: each level is a forward over the best `width` leaves of a request, each of which gets
    `children`."""

    width: int
    children: int = 4


@dataclass
class _Session:
    """A request as the draft sees it: which committed tokens have KV here, and the tree that it grew."""

    slots: NDArray[np.int32]  # [num_computed]
    tree: TreeBuilder = field(default_factory=TreeBuilder)
    node_slots: dict[int, int] = field(default_factory=dict)  # of expanded nodes

    def best(self, count: int) -> TokenTree:
        tree = self.tree.tree()
        return tree.take(tree.best(count))

    def node_rows(self, nodes: list[int]) -> NodeRows:
        tree = self.tree.tree()
        slots = np.zeros(len(tree), np.int32)
        slots[list(self.node_slots)] = list(self.node_slots.values())
        return NodeRows.of(tree, slots, np.array(nodes, np.int64))


class LMDrafter:
    """Trees of a target in the same process: grown when the target asks, dropped when it commits.

    Slots run out gracefully: a request that gets none proposes an empty tree.
    """

    def __init__(
        self,
        executor: Executor,
        shape: TreeShape,
        clock: Callable[[], float] = time.perf_counter,
        unshared: frozenset[int] = frozenset(),
    ) -> None:
        """`unshared` are ids of tokens that the target lacks."""
        self.executor = executor
        self.shape = shape
        self.unshared = unshared
        self.pool = SlotPool(executor.num_slots)
        self._sessions: dict[int, _Session] = {}
        self._level_seconds = SecondsBySize(0.0)  # by sequences
        self._clock = clock
        self.levels = 0

    # -- the protocol

    def propose(self, requests: Sequence[Request], limits: DraftLimits) -> list[TokenTree]:
        self.levels = 0
        if limits.levels == 0:
            return [TokenTree.empty()] * len(requests)
        served = self._affordable(requests, limits.levels)
        for request in served:
            self._catch_up(request)
        if served:
            self._grow(served, limits)
        grown = {request.id for request in served}
        return [self._sessions[r.id].best(limits.nodes) if r.id in grown else TokenTree.empty() for r in requests]

    def commit(self, request: Request, tokens: Sequence[int]) -> bool:
        """Accepted nodes that were expanded keep their KV; the rest of the tree is freed. The last token
        stays without KV whatever the tree holds: the next tree needs its logits."""
        session = self._sessions.get(request.id)
        if session is None:
            return False
        path = [node for node in session.tree.tree().follow(tokens[:-1]) if node in session.node_slots]
        kept = [session.node_slots.pop(node) for node in path]
        session.slots = np.append(session.slots, np.array(kept, np.int32))
        self._drop_tree(session)
        return False

    def close(self, request: Request) -> None:
        session = self._sessions.pop(request.id, None)
        if session is not None:
            self._drop_tree(session)
            self.pool.release(session.slots.tolist())

    def check(self) -> None:
        """EngineError unless every slot is free or belongs to exactly one session."""
        owned = [s for x in self._sessions.values() for s in (*x.slots.tolist(), *x.node_slots.values())]
        self.pool.check(owned)

    def _drop_tree(self, session: _Session) -> None:
        self.pool.release(list(session.node_slots.values()))
        session.tree, session.node_slots = TreeBuilder(), {}

    # -- the draft's own KV of committed tokens

    def _affordable(self, requests: Sequence[Request], levels: int) -> list[Request]:
        """The requests, in order, whose missing tokens and whose tree fit into the free slots and the context."""
        served, left = [], self.pool.num_free
        for request in requests:
            session = self._sessions.setdefault(request.id, _Session(np.zeros(0, np.int32)))
            need = len(request.tokens) - len(session.slots) + levels * self.shape.width
            if need <= left and len(request.tokens) + levels <= self.executor.context:
                left -= need
                served.append(request)
        return served

    def _catch_up(self, request: Request) -> None:
        """Compute KV of committed tokens up to the last chunk, which `_grow` takes for its logits."""
        session = self._sessions[request.id]
        while len(request.tokens) - len(session.slots) > CHUNK:
            self.executor.execute([self._committed_rows(request, session, CHUNK, kept=())], NO_SAMPLING)

    def _committed_rows(self, request: Request, session: _Session, count: int, kept: Sequence[int]) -> SequenceRows:
        start = len(session.slots)
        session.slots = np.append(session.slots, self.pool.allocate(count))
        tokens = readable(request.tokens[start : start + count], self.executor.vocab_size)
        return SequenceRows(start, tokens, session.slots, NO_NODES, kept)

    # -- growth

    def _grow(self, requests: Sequence[Request], limits: DraftLimits) -> None:
        rows = []
        for request in requests:
            session = self._sessions[request.id]
            count = len(request.tokens) - len(session.slots)
            rows.append(self._committed_rows(request, session, count, kept=[count - 1]))
        self._expand(requests, [[ROOT]] * len(requests), rows, limits.nodes)
        for _ in range(limits.levels - 1):
            floor = self._floor(requests, limits.total)
            leaves = [self._best_leaves(request, limits.nodes, floor) for request in requests]
            if not any(leaves) or self._promise(requests, leaves) < limits.price * self._level_seconds.at(
                len(requests)
            ):
                return
            began = self._clock()
            rows = [self._leaf_rows(r, nodes) for r, nodes in zip(requests, leaves, strict=True)]
            self._expand(requests, leaves, rows, limits.nodes)
            self._level_seconds.observe(len(requests), self._clock() - began)

    def _promise(self, requests: Sequence[Request], leaves: Sequence[Sequence[int]]) -> float:
        """Tokens that a level over these leaves would bring if each had the right child."""
        trees = [self._sessions[request.id].tree for request in requests]
        return sum(math.exp(tree.scores[n]) for tree, nodes in zip(trees, leaves, strict=True) for n in nodes)

    def _floor(self, requests: Sequence[Request], total: int) -> float:
        """The score that a node must exceed to be among the `total` best of all trees."""
        return _nth_largest([s for request in requests for s in self._sessions[request.id].tree.scores], total)

    def _best_leaves(self, request: Request, max_nodes: int, floor: float) -> list[int]:
        """The best nodes to expand next: not yet expanded, not too deep to be committed, and good enough
        that a child (whose score is no higher) could be among the proposed and verified."""
        session = self._sessions[request.id]
        tree = session.tree
        scores = np.array(tree.scores)
        floor = max(floor, _nth_largest(scores, max_nodes))
        scores[list(session.node_slots)] = -math.inf
        leaves = np.flatnonzero((scores > floor) & (np.array(tree.depths, np.int64) < request.num_remaining))
        best = leaves[np.argsort(-scores[leaves], kind="stable")[: self.shape.width]]
        return np.sort(best).tolist()  # type: ignore[no-any-return]

    def _leaf_rows(self, request: Request, nodes: list[int]) -> SequenceRows:
        session = self._sessions[request.id]
        session.node_slots.update(zip(nodes, self.pool.allocate(len(nodes)).tolist(), strict=True))
        return SequenceRows(len(session.slots), [], session.slots, session.node_rows(nodes), kept=())

    def _expand(
        self, requests: Sequence[Request], nodes: Sequence[Sequence[int]], rows: Sequence[SequenceRows], max_nodes: int
    ) -> None:
        """One forward; each expanded node gets those of its children that may be among a tree's `max_nodes` best."""
        self.levels += 1
        outcome = self.executor.execute(rows, self._sampling(requests, nodes))
        assert outcome.log_chances is not None
        first = 0
        for request, expanded in zip(requests, nodes, strict=True):
            own = slice(first, first + len(expanded))
            tree = self._sessions[request.id].tree
            self._add_best(tree, expanded, outcome.tokens[own], outcome.log_chances[own], max_nodes)
            first = own.stop

    def _add_best(
        self, tree: TreeBuilder, expanded: Sequence[int], tokens: Ints, log_chances: Floats, max_nodes: int
    ) -> None:
        """Where filters leave fewer tokens than there are children, the others' chance is -inf."""
        before = np.array([*tree.scores, 0.0])  # the root is at -1
        scores = before[list(expanded), None] + log_chances
        floor = _nth_largest(np.concatenate((before[:-1], scores.ravel())), max_nodes)
        for row, column in np.argwhere((scores >= floor) & (scores > -math.inf)).tolist():
            token = int(tokens[row, column])
            if token not in self.unshared:
                tree.add(expanded[row], token, float(scores[row, column]), LM)

    def _sampling(self, requests: Sequence[Request], nodes: Sequence[Sequence[int]]) -> Sampling:
        """The target's rules hold on the path to each node: a draft that ignored them would guess excluded tokens."""
        sequences = np.repeat(np.arange(len(requests)), [len(expanded) for expanded in nodes])
        each = [(request, node) for request, expanded in zip(requests, nodes, strict=True) for node in expanded]
        lengths = [len(request.tokens) + self._depth(request, node) for request, node in each]
        edits = [self._edits(request, node) for request, node in each]
        params, seeds = [request.params for request in requests], [request.seed for request in requests]
        places = np.arange(len(each))
        return Sampling(places, params, seeds, sequences, np.array(lengths, np.int64), edits, self.shape.children)

    def _depth(self, request: Request, node: int) -> int:
        return 0 if node == ROOT else self._sessions[request.id].tree.depths[node]

    def _edits(self, request: Request, node: int) -> LogitEdits | None:
        tree = self._sessions[request.id].tree
        return None if request.rules is None else request.rules.edits(tree.tree().path_tokens(node))


def _nth_largest(values: Sequence[float] | NDArray[np.float64], n: int) -> float:
    """-infinity where there are fewer."""
    return float(np.partition(values, -n)[-n]) if len(values) >= n else -math.inf
