"""A trained head as the draft in the target's process: each of its rows has the feature of the token before, whatever
became of sequence and slots in between. The head is scripted: what it guesses depends on every feature that it read."""

import math
from collections.abc import Sequence

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sizes import sized
from support import limits, paths_of, proposed

from pilotfish.core.cache.slots import GONE, SlotPool
from pilotfish.core.features.features import Features
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import ANY_DEPTH, Outcome, Sampling, SequenceRows
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.tree import TokenTree
from pilotfish.workers import lm
from pilotfish.workers.lm import LMDrafter

VOCAB, CHILDREN, WIDTH = 50, 2, 2
LIMITS = limits(nodes=12, levels=3)
CHANCES = np.log([0.6, 0.3])
TARGET_SLOTS = 400


def feature(tokens: Sequence[int]) -> int:
    """Of the last of `tokens`."""
    return hash(tuple(tokens)) % 2**20


def states_of(tokens: Sequence[int], path: Sequence[int] = ()) -> list[int]:
    """What a head has in the slots of committed tokens, but for the first, and of nodes below them."""
    states = [hash((feature(tokens[:place]), tokens[place])) for place in range(1, len(tokens))]
    for token in path:
        states.append(hash((states[-1], token)))
    return states


def guesses_after(states: Sequence[int]) -> list[int]:
    """Depend on all slots, as with attention."""
    mixed = hash(tuple(states))
    return [(mixed + 7 * child) % VOCAB for child in range(CHILDREN)]


class Target:
    """Slots and the features in them; those that are given back hold something else at once."""

    def __init__(self) -> None:
        self.pool = SlotPool(TARGET_SLOTS)
        self.plane = np.full(TARGET_SLOTS, -1)

    def compute(self, request: Request, count: int) -> None:
        slots = self.pool.allocate(count)
        first = request.num_computed
        request.add_slots(slots)
        told = [feature(request.tokens[: place + 1]) for place in range(first, first + count)]
        self.plane[slots] = told

    def free(self, request: Request) -> None:
        held = request.held
        self.plane[held[held != GONE]] = -1
        self.pool.release(held[held != GONE])


class Head:
    """Implements Executor."""

    context, vocab_size, deepest, feature_width = 1000, VOCAB, ANY_DEPTH, 1

    def __init__(self, target: Target, slots: int = 400) -> None:
        self.target, self.num_slots, self.read = target, slots, list[int]()
        self.states = [0] * slots
        self.rows: list[int] = []  # of committed tokens, a forward

    def padded(self, rows: int) -> int:
        return rows

    def execute(self, rows: Sequence[SequenceRows], sampling: Sampling) -> Outcome:
        self.rows.append(sum(len(sequence.tokens) for sequence in rows))
        kept = [states for sequence in rows for states in self._run(sequence)]
        assert len(kept) == len(sampling)
        if not kept:
            return Outcome(np.zeros(0, np.int64))
        return Outcome(np.array([guesses_after(states) for states in kept]), np.tile(CHANCES, (len(kept), 1)))

    def _run(self, sequence: SequenceRows) -> list[list[int]]:
        """Writes states; those that each kept row sees."""
        slots, kept = sequence.prefix_slots.tolist(), list[list[int]]()
        assert sequence.features is not None or not len(sequence.tokens)
        for offset, token in enumerate(sequence.tokens):
            place = sequence.start + offset
            assert sequence.features is not None
            said = sequence.features[offset, 0]
            assert math.isnan(said) == (place == 0)
            if place:
                self.read.append(int(said) - 1)
                self.states[slots[place]] = hash((int(self.target.plane[self.read[-1]]), token))
        if sequence.kept:
            assert list(sequence.kept) == [len(sequence.tokens) - 1]
            kept.append([self.states[slot] for slot in slots[1:]])
        for node in range(len(sequence.nodes)):
            path = sequence.nodes.paths[node, : sequence.nodes.depths[node]].tolist()
            above = self.states[[*slots, *path][-2]]
            self.states[path[-1]] = hash((above, int(sequence.nodes.tokens[node])))
            kept.append([self.states[slot] for slot in [*slots[1:], *path]])
        return kept


def make_drafter(target: Target, slots: int = 400, **options: bool) -> tuple[LMDrafter, Head]:
    head = Head(target, slots)
    return LMDrafter(head, WIDTH, CHILDREN, reads_target=True, **options), head


def make_request(number: int, tokens: Sequence[int], max_tokens: int = 60) -> Request:
    return Request(number, tokens, SamplingParams(max_tokens=max_tokens), 1, frozenset(), 1000)


def assert_right(tree: TokenTree, request: Request) -> None:
    """Every node is what the head says after the features and tokens down to its parent."""
    for path in paths_of(tree):
        assert path[-1] in guesses_after(states_of(request.tokens, path[:-1]))


class HeadsMachine(RuleBasedStateMachine):
    """Requests that arrive, are computed in chunks, guessed for, committed to, preempted and ended."""

    @initialize(slots=st.sampled_from([60, 400]), cached=st.booleans(), chunk=st.sampled_from([3, 256]))
    def begin(self, slots: int, cached: bool, chunk: int) -> None:
        self.roomy = slots == 400
        self.chunk_before, lm.CHUNK = lm.CHUNK, chunk
        self.target = Target()
        self.drafter, _ = make_drafter(self.target, slots, prefix_cache=cached)
        self.requests: dict[int, Request] = {}

    def teardown(self) -> None:
        if hasattr(self, "chunk_before"):
            lm.CHUNK = self.chunk_before

    @precondition(lambda self: len(self.requests) < 4)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def arrive(self, tokens: list[int]) -> None:
        number = max(self.requests, default=0) + 1
        self.requests[number] = make_request(number, tokens)

    @rule(data=st.data(), chunk=st.integers(1, 20), accepted=st.integers(0, 3), bonus=st.integers(0, 1))
    def step(self, data: st.DataObject, chunk: int, accepted: int, bonus: int) -> None:
        chosen = [request for request in self.requests.values() if data.draw(st.booleans())]
        complete = [request for request in chosen if request.num_pending <= chunk]
        for request, tree in zip(complete, proposed(self.drafter, complete, LIMITS), strict=True):
            assert_right(tree, request)
            if not len(request.tokens) - 1 == request.num_computed > 0:
                assert not len(tree)
            elif self.roomy and request.num_remaining > 1:
                assert len(tree)
            path = next((path for path in paths_of(tree) if len(path) == accepted), ())
            self.target.compute(request, request.num_pending)
            self._commit(request, [*path, bonus])
        for request in (one for one in chosen if one not in complete):
            self.target.compute(request, chunk)

    def _commit(self, request: Request, tokens: Sequence[int]) -> None:
        """The accepted path has its KV from the step; the bonus token has none."""
        committed = request.extend(tokens)
        if request.finish_reason is not None:
            self._end(request)
            return
        if len(committed) > 1:
            self.target.compute(request, len(committed) - 1)
        self.drafter.commit(request, committed)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self._end(data.draw(st.sampled_from(list(self.requests.values()))))

    def _end(self, request: Request) -> None:
        self.drafter.close(request)
        self.target.free(request)
        del self.requests[request.id]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(list(self.requests.values())))
        self.drafter.close(request)
        self.target.free(request)
        request.restart()

    @invariant()
    def every_slot_has_an_owner(self) -> None:
        self.drafter.table.check()


TestHeads = HeadsMachine.TestCase
TestHeads.settings = settings(max_examples=sized(35, 400), stateful_step_count=30, deadline=None)


def test_the_next_turn_reads_only_features_of_what_is_new() -> None:
    target = Target()
    drafter, head = make_drafter(target)
    first = make_request(1, [1, 2] * 10)
    target.compute(first, 19)
    proposed(drafter, [first], LIMITS)
    drafter.close(first)
    second = make_request(2, [*[1, 2] * 10, 3, 4])
    target.compute(second, 21)
    head.rows.clear()
    head.read.clear()
    (tree,) = proposed(drafter, [second], LIMITS)
    assert head.rows[0] == 2 and head.read == second.slots[19:21].tolist()
    assert_right(tree, second)


def test_features_whose_slots_were_given_back_are_not_known() -> None:
    """Where all layers of a target have windows: the head computes the rows as it can."""
    target, seen = Target(), list[Features]()
    drafter, head = make_drafter(target)

    def execute(rows: Sequence[SequenceRows], sampling: Sampling) -> Outcome:
        seen.extend(sequence.features for sequence in rows if sequence.features is not None)
        return Outcome(np.zeros((len(sampling), CHILDREN), np.int64), np.tile(CHANCES, (len(sampling), 1)))

    head.execute = execute  # type: ignore[method-assign]
    request = make_request(1, [1, 2, 3, 4, 5, 6])
    target.compute(request, 5)
    target.pool.release(request.give_back(3))
    (tree,) = proposed(drafter, [request], LIMITS)
    assert len(tree) and np.isnan(seen[0][:, 0]).tolist() == [True, True, True, True, False, False]


def test_a_head_that_is_wrong_about_everything_costs_only_guesses() -> None:
    """Chances that are no numbers give no node."""
    target = Target()
    drafter, head = make_drafter(target)

    def execute(rows: Sequence[SequenceRows], sampling: Sampling) -> Outcome:  # noqa: ARG001
        shape = len(sampling), CHILDREN
        return Outcome(np.zeros(shape, np.int64), np.full(shape, np.nan))

    head.execute = execute  # type: ignore[method-assign]
    request = make_request(1, [1, 2, 3])
    target.compute(request, 2)
    assert not len(proposed(drafter, [request], LIMITS)[0])
    drafter.table.check()
