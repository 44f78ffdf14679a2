"""The scheduler under random arrivals, aborts, drafts and tokens: nothing lost, nobody starved, nothing changed."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from sizes import sized
from support import paths_of, random_guesses
from trees import trees_of

from pilotfish.core.cache import prefix_keys, tiers
from pilotfish.core.cache.prefix_cache import PrefixCache
from pilotfish.core.cache.prefix_keys import Key, root_key
from pilotfish.core.cache.slots import SlotPool, Slots
from pilotfish.core.cache.tiers import KVLoad
from pilotfish.core.prefilling.handover import WHOLE, HandOver
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling import loads
from pilotfish.core.scheduling import request as requests
from pilotfish.core.scheduling.request import MAX_PASSED_OVER, FinishReason, Request
from pilotfish.core.scheduling.scheduler import Scheduler
from pilotfish.core.scheduling.step import RowCosts, Step
from pilotfish.core.trees.tree import ROOT, Forest, Guesses, Ints
from pilotfish.errors import PromptError

VOCAB = 5
STOP = 4


def next_token(request: Request, path: list[int]) -> int:
    """The target: any function of seed and tokens."""
    return hash((request.seed, *request.tokens, *path)) % VOCAB


def alone(request: Request) -> list[int]:
    """What a request's output is without tree, batch or chunk."""
    prompt = request.tokens[: request.num_prompt_tokens]
    twin = Request(request.id, prompt, request.params, request.seed, request.stop_ids, 1000)
    while twin.finish_reason is None:
        twin.extend([next_token(twin, [])])
    return twin.output


def new_request(number: int, prompt: int, max_tokens: int) -> Request:
    params, salt = SamplingParams(max_tokens=max_tokens), "a" if number % 8 == 7 else None
    tokens = [(number % 4 > 0) * (place % 3) for place in range(prompt)]  # they begin alike, and part at every length
    return Request(number, tokens, params, 1000 + number, frozenset({STOP}), 1000, cache_salt=salt)


def add_all(scheduler: Scheduler, requests: Sequence[Request]) -> None:
    for request in requests:
        scheduler.add(request)


def guess(request: Request, rng: np.random.Generator, nodes: int) -> Guesses:
    """A random tree, half of the time with the right path in it."""
    tree, path = Guesses(), list[int]()
    node = ROOT
    for _ in range(int(rng.integers(0, 5)) if rng.random() < 0.5 else 0):
        path.append(next_token(request, path))
        node = tree.add(node, path[-1], float(-rng.exponential()))
    tree.merge(random_guesses(rng, VOCAB, nodes))
    return tree


#: By slot: the tenant and the tokens, from the sequence's first one on, whose KV a device would have there.
Written = dict[int, tuple[str | None, tuple[int, ...]]]


def compute(step: Step, written: Written, pool: SlotPool) -> None:
    """Write what the forward of `step` would, after looking at what it reads."""
    chunks = [chunk for chunk in step.chunks if chunk.forked_from is None]
    trees = {request.id: tree for request, tree in zip(step.requests, trees_of(step.forest), strict=True)}
    for chunk, rows in zip(chunks, step.rows(), strict=True):
        salt, tokens = chunk.request.cache_salt, chunk.request.tokens
        for place, slot in enumerate(rows.prefix_slots.tolist()):
            held = salt, tuple(tokens[: place + 1])
            if place >= rows.start:
                written[slot] = held
            assert written[slot] == held or (pool.window and place <= rows.start - pool.window)
        for node, slot in enumerate(rows.nodes.slots.tolist() if len(rows.nodes) else ()):
            written[slot] = salt, (*tokens, *trees[chunk.request.id].path_tokens(node))


def taken(
    scheduler: Scheduler, guesses: Callable[[Request], Guesses], written: Written | None = None, ends: bool = True
) -> Step:
    """One step over what `guesses` gives, of whatever runs; it is cancelled unless it `ends`."""
    plan = scheduler.plan()
    trees = [guesses(chunk.request) for chunk in plan.chunks if chunk.complete]
    step = scheduler.schedule(plan.chunks, Forest.of(trees), 1000)
    assert step.num_rows == sum(rows.num_rows for rows in step.rows()) <= scheduler.max_rows
    if written is not None:
        compute(step, written, scheduler.pool)
    if ends:
        scheduler.commit(step, sampled_of(step))
    else:
        scheduler.cancel(step)
    scheduler.check()
    return step


def no_guess(_: Request) -> Guesses:
    return Guesses()


def advance(scheduler: Scheduler, rng: np.random.Generator, nodes: int, written: Written | None = None) -> Step | None:
    """One step as the worker takes it, its promises checked on the way; None where all wait for tiers."""
    plan = scheduler.plan()
    assert scheduler.running, "something waits and nothing runs"
    if not plan.chunks:
        assert all(request.load is not None for request in scheduler.running)
        scheduler.wait()
        return None
    assert all(r.stats.preemptions == 1 and r.num_computed == 0 for r in plan.preempted)
    trees = [guess(chunk.request, rng, nodes) for chunk in plan.chunks if chunk.complete]
    step = scheduler.schedule(plan.chunks, Forest.of(trees), 1000)
    assert step.num_rows == sum(rows.num_rows for rows in step.rows()) <= scheduler.max_rows
    assert [chunk.request for chunk in step.chunks] == [r for r in scheduler.running if r.load is None]
    assert all(chunk.count >= 1 for chunk in step.chunks)
    for cut, whole in zip(trees_of(step.forest), trees, strict=True):
        assert paths_of(cut).items() <= paths_of(whole.tree()).items()
    if written is not None:
        compute(step, written, scheduler.pool)
    scheduler.commit(step, sampled_of(step))
    return step


def sampled_of(step: Step) -> np.ndarray:
    """The target's token after each root and each node."""
    trees = zip(step.requests, trees_of(step.forest), strict=True)
    nodes = [(request, tree.path_tokens(n)) for request, tree in trees for n in (ROOT, *range(len(tree)))]
    return np.array([next_token(request, path) for request, path in nodes], np.int64)


class SchedulerMachine(RuleBasedStateMachine):
    """Any sequence of arrivals, aborts and steps."""

    @initialize(
        capacity=st.integers(20, 80),
        max_rows=st.integers(1, 24),
        max_requests=st.integers(1, 8),
        seed=st.integers(0, 1 << 32),
    )
    def begin(self, capacity: int, max_rows: int, max_requests: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.requests: list[Request] = []
        self.written: Written = {}
        self.scheduler = self.scheduler_of(SlotPool(capacity), max_rows, max_requests)

    def scheduler_of(self, pool: SlotPool, max_rows: int, max_requests: int) -> Scheduler:
        """With a cache of prefixes or none, and maybe in a pool whose rows see few positions."""
        pool.window = int(self.rng.choice([0, self.rng.integers(1, 16)]))
        return Scheduler(pool, max_rows, max_requests, PrefixCache(pool) if self.rng.random() < 0.6 else None)

    @rule(prompt=st.integers(1, 30), max_tokens=st.integers(1, 12))
    def add(self, prompt: int, max_tokens: int) -> None:
        request = new_request(len(self.requests), prompt, max_tokens)
        window, capacity = self.scheduler.pool.window, self.scheduler.pool.capacity
        seen = window - 1 + self.scheduler.max_rows if window else request.max_length
        if min(seen, request.max_length) > capacity:
            with pytest.raises(PromptError, match="KV slots"):
                self.scheduler.add(request)
        else:
            self.scheduler.add(request)
            self.requests.append(request)

    @rule(which=st.integers(0, 100))
    def abort(self, which: int) -> None:
        if self.requests:
            request = self.requests[which % len(self.requests)]
            reason = request.finish_reason
            self.scheduler.abort(request)
            assert request.finish_reason is (reason or FinishReason.ABORT)

    @rule(nodes=st.integers(0, 20))
    def step(self, nodes: int) -> None:
        if self.scheduler.busy:
            advance(self.scheduler, self.rng, nodes, self.written)
            waiting = [r.id for r in self.scheduler.waiting if not r.stats.preemptions]
            assert waiting == sorted(waiting)  # in order of arrival
            assert all(r.passed_over <= MAX_PASSED_OVER for r in self.requests)

    @rule(steps=st.integers(1, 12))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.step(4)
            self.nothing_is_lost()

    @rule(count=st.integers(10, 80))
    def evict(self, count: int) -> None:
        self.scheduler.cache.evict(count)

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "scheduler"):
            scheduler = self.scheduler
            scheduler.check()
            assert len(scheduler.running) <= scheduler.max_requests
            alive = [r for r in self.requests if r.finish_reason is None]
            assert sorted([*scheduler.running, *scheduler.waiting], key=lambda r: r.id) == alive
            assert all(r.stats.preemptions <= 1 for r in alive)
            assert all(0 <= r.num_gone <= r.num_computed < len(r.tokens) for r in scheduler.running)
            assert all(r.num_held <= scheduler.most(r) <= scheduler.pool.capacity for r in scheduler.running)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        steps = sum(r.max_length for r in self.requests)  # each brings each a row
        while self.scheduler.busy and steps:
            steps -= advance(self.scheduler, self.rng, 6, self.written) is not None
        assert not self.scheduler.busy
        self.scheduler.check()
        assert self.scheduler.pool.num_available == self.scheduler.pool.capacity
        for request in self.requests:
            self.assert_output(request)
        self.assert_nothing_is_claimed()

    def assert_output(self, request: Request) -> None:
        expected = alone(request)
        if request.finish_reason is FinishReason.ABORT:
            assert request.output == expected[: len(request.output)]
        else:
            assert request.output == expected
            stop = FinishReason.STOP if expected[-1] == STOP else FinishReason.LENGTH
            assert request.finish_reason is stop

    def assert_nothing_is_claimed(self) -> None:
        """A request that needs the whole pool is admitted at once."""
        whole = new_request(0, self.scheduler.pool.capacity - 1, 1)
        self.scheduler.add(whole)
        self.scheduler.plan()
        assert self.scheduler.running == [whole]


class WindowedMachine(SchedulerMachine):
    def scheduler_of(self, pool: SlotPool, max_rows: int, max_requests: int) -> Scheduler:
        pool.window = int(self.rng.integers(1, 16))
        return Scheduler(pool, max_rows, max_requests, PrefixCache(pool))


def test_windows_under_long_random_runs() -> None:
    """As the machine's rules, many more of them: requests longer than the pool, preempted, found again in part."""
    longer = preempted = found = 0
    for seed in range(sized(4, 24)):
        machine, rng = WindowedMachine(), np.random.default_rng(seed)
        machine.begin(int(rng.integers(16, 30)), int(rng.integers(4, 16)), int(rng.integers(4, 12)), seed)
        machine.scheduler.headroom = 0
        for _ in range(sized(120, 150)):
            if rng.random() < 0.5:
                machine.add(int(rng.integers(1, rng.choice([4, 60]))), int(rng.integers(1, 30)))
            if rng.random() < 0.05:
                machine.abort(int(rng.integers(0, 100)))
            machine.nothing_is_lost()
            machine.step(int(rng.integers(0, 6)))
            machine.nothing_is_lost()
        machine.teardown()
        capacity, done = machine.scheduler.pool.capacity, machine.requests
        longer += sum(len(request.tokens) > capacity for request in done)
        preempted += machine.scheduler.preemptions
        found += sum(request.stats.cached_tokens >= machine.scheduler.pool.window for request in done)
    assert longer > sized(20, 30) and preempted > sized(8, 12) and found > sized(20, 30)


class _Random:
    def __init__(self, rng: np.random.Generator, written: Written) -> None:
        self.rng, self.written = rng, written
        self.brought = 0  # tokens

    def computed(self, tokens: int, seconds: float) -> None:
        """Speeds play no part here."""

    def wait(self) -> None:
        """Time passes with `poll`."""


class RandomTiers(_Random):
    """Tiers that save, load, lose and fail at random moments. Objects hold what a device would have in their slots when
    they are copied."""

    def __init__(self, rng: np.random.Generator, written: Written) -> None:
        super().__init__(rng, written)
        self.stored: dict[Key, list[tuple[str | None, tuple[int, ...]]]] = {}
        self.saving: list[tuple[Key, list[int]]] = []
        self.loading: list[KVLoad] = []

    def root(self, salt: str | None) -> Key:
        return root_key(b"", salt)

    def worth_loading(self, keys: Sequence[Key], skipped: int) -> int:
        assert 0 <= skipped < SMALL
        known = next((place for place, key in enumerate(keys) if key not in self.stored), len(keys))
        return known if self.rng.random() < 0.8 else int(self.rng.integers(known + 1))

    def load(self, load: KVLoad) -> None:
        assert load.count is None
        self.loading.append(load)

    def poll(self) -> None:
        """Time passes: copies end, objects are lost, loads come, in whole or in part."""
        for save in [save for save in self.saving if self.rng.random() < 0.5]:
            self.saving.remove(save)
            self.stored[save[0]] = [self.written[slot] for slot in save[1]]
        for key in [key for key in self.stored if self.rng.random() < 0.01]:
            del self.stored[key]
        for load in [load for load in self.loading if self.rng.random() < 0.2]:
            self.cancel(load)

    def cancel(self, load: KVLoad) -> None:
        self.loading.remove(load)
        there = next((place for place, key in enumerate(load.keys) if key not in self.stored), len(load.keys))
        if self.rng.random() < 0.3:
            there = int(self.rng.integers(there + 1))
        for place, key in enumerate(load.keys[:there]):
            slots = load.object_slots(place).tolist()
            self.written.update(zip(slots, self.stored[key][SMALL - len(slots) :], strict=True))
        load.arrived(["host"] * there)
        assert load.count is not None
        self.brought += load.count

    def save(self, key: Key, tokens: Ints, slots: Slots) -> None:
        assert len(tokens) == len(slots) == SMALL
        if key not in self.stored and self.rng.random() < 0.9:
            self.saving.append((key, slots.tolist()))

    def dropped(self, slots: Slots) -> None:
        gone = set(slots.tolist())
        self.saving = [save for save in self.saving if gone.isdisjoint(save[1])]

    def closing(self) -> None:
        """The end plays no part here."""


class RandomPrefills(_Random):
    """Prefill workers that bring what is asked of them at random moments, in whole or in part."""

    def __init__(self, rng: np.random.Generator, written: Written) -> None:
        super().__init__(rng, written)
        self.under_way: list[HandOver] = []

    def worth_sending(self, tokens: Sequence[int], first: int, salt: str | None, waiting: int, neighbours: int) -> bool:  # noqa: ARG002
        assert 0 <= first < len(tokens) and waiting >= 0
        return self.rng.random() < 0.7

    def begin(self, handover: HandOver) -> None:
        assert handover.count is None and len(handover.slots) >= 1
        self.under_way.append(handover)

    def poll(self) -> None:
        for handover in [handover for handover in self.under_way if self.rng.random() < 0.2]:
            self.cancel(handover)

    def cancel(self, handover: HandOver) -> None:
        self.under_way.remove(handover)
        whole = len(handover.slots)
        count = whole if self.rng.random() < 0.7 else int(self.rng.integers(whole + 1))
        handover.end(count, WHOLE if count == whole else "gone", 0.0)
        self.brought += count
        for place, slot in enumerate(handover.slots.tolist()[:count]):
            self.written[slot] = handover.salt, tuple(handover.tokens[: handover.first + place + 1])


#: Tokens of an object here.
SMALL = 4


@pytest.fixture(scope="module", autouse=True)
def _small_objects() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (prefix_keys, tiers, loads, requests):
            patch.setattr(module, "OBJECT_TOKENS", SMALL)
        yield


class HandingMachine(SchedulerMachine):
    """With tiers below the cache, and mostly with prefill workers beside it."""

    def scheduler_of(self, pool: SlotPool, max_rows: int, max_requests: int) -> Scheduler:
        self.tiers = RandomTiers(self.rng, self.written)
        self.prefills = RandomPrefills(self.rng, self.written)
        cache = PrefixCache(pool, dropped=self.tiers.dropped)
        prefills = self.prefills if self.rng.random() < 0.7 else None
        return Scheduler(pool, max_rows, max_requests, cache, self.tiers, prefills)

    @rule()
    def save_all(self) -> None:
        self.scheduler.save_all()

    @rule()
    def abort_what_loads(self) -> None:
        for request in [r for r in self.scheduler.running if r.load is not None]:
            self.scheduler.abort(request)
            assert request.load is None


def test_handovers_under_long_random_runs() -> None:
    """Beside tiers: a request may wait for a load, then for a hand-over; both are aborted, preempted, and come in
    part."""
    brought = after_load = aborted = preempted = loaded = 0
    for seed in range(sized(5, 24)):
        machine, rng = HandingMachine(), np.random.default_rng(seed)
        machine.begin(int(rng.integers(30, 80)), int(rng.integers(2, 24)), int(rng.integers(2, 8)), seed)
        machine.scheduler.headroom = 0  # so that some are preempted
        for _ in range(sized(200, 300)):
            if rng.random() < 0.3:
                machine.add(int(rng.integers(1, 30)), int(rng.integers(1, 12)))
            if rng.random() < 0.1:
                machine.evict(80)
            if rng.random() < 0.05:
                aborted += len(machine.prefills.under_way)
                machine.abort_what_loads()
                assert not machine.prefills.under_way
            machine.nothing_is_lost()
            machine.step(int(rng.integers(0, 6)))
            machine.nothing_is_lost()
        done = [request for request in machine.requests if request.stats.handovers]
        after_load += sum("host" in request.stats.cached_by_tier for request in done)
        preempted += sum(bool(request.stats.preemptions) for request in done)
        brought += machine.prefills.brought
        loaded += machine.tiers.brought
        machine.teardown()
    assert brought > sized(400, 700) and after_load > sized(3, 5) and aborted > sized(6, 10)
    assert preempted > sized(0, 1) and loaded > sized(300, 500)


TestHandOvers = HandingMachine.TestCase
TestHandOvers.settings = settings(max_examples=sized(15, 120), stateful_step_count=45)
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=sized(25, 300), stateful_step_count=40)


@given(seed=st.integers(0, 1 << 32), count=st.integers(1, 6), budget=st.integers(0, 40))
def test_rows_go_to_the_best_nodes_of_all_trees(seed: int, count: int, budget: int) -> None:
    rng = np.random.default_rng(seed)
    scheduler = Scheduler(SlotPool(1000), max_rows=100, max_requests=8)
    add_all(scheduler, [new_request(number, 1, 100) for number in range(count)])
    trees = [random_guesses(rng, VOCAB, int(rng.integers(0, 12))) for _ in range(count)]
    step = scheduler.schedule(scheduler.plan().chunks, Forest.of(trees), budget)
    every = sorted((score for tree in trees for score in tree.scores), reverse=True)
    assert sorted(step.forest.nodes.scores, reverse=True) == every[:budget]


def test_a_request_may_want_few_nodes_or_none() -> None:
    rng = np.random.default_rng(0)
    scheduler = Scheduler(SlotPool(1000), max_rows=100, max_requests=8)
    for number, most in enumerate((None, 3, 0)):
        params = SamplingParams(max_tokens=100)
        scheduler.add(Request(number, [1], params, number, frozenset(), 1000, max_nodes=most))
    trees = [random_guesses(rng, VOCAB, 12) for _ in range(3)]
    step = scheduler.schedule(scheduler.plan().chunks, Forest.of(trees), 1000)
    assert [len(tree) for tree in trees_of(step.forest)] == [len(trees[0]), 3, 0]
    assert paths_of(trees_of(step.forest)[1]) == paths_of(trees[1].best(3).tree())


def test_trees_never_make_a_request_give_way() -> None:
    """Two requests that fill the pool run to their end beside trees that would fill it as well."""
    scheduler = Scheduler(SlotPool(20), max_rows=64, max_requests=2)
    requests = [new_request(i, 4, 6) for i in (1, 2)]
    add_all(scheduler, requests)
    rng = np.random.default_rng(1)
    while scheduler.busy:
        advance(scheduler, rng, 30)
    assert all(request.output == alone(request) for request in requests)
    assert not any(request.stats.preemptions for request in requests)


def test_the_youngest_gives_way_once_and_starts_again() -> None:
    """Four requests are admitted on their prompts; the pool holds less than two of them in full."""
    pool = SlotPool(380)
    scheduler = Scheduler(pool, max_rows=64, max_requests=8)
    requests = [Request(i, [i] * 20, SamplingParams(max_tokens=230), i, frozenset(), 1000) for i in range(4)]
    add_all(scheduler, requests)
    rng = np.random.default_rng(0)
    advance(scheduler, rng, 0)
    assert len(scheduler.running) == 4
    while scheduler.busy:
        advance(scheduler, rng, 4)
        scheduler.check()
    assert [r.output for r in requests] == [alone(r) for r in requests]
    assert requests[0].stats.preemptions == 0
    assert [r.stats.preemptions for r in requests[2:]] == [1, 1]
    assert pool.num_free == pool.capacity


def test_prompt_tokens_are_scored_once_however_often_they_are_computed() -> None:
    request = Request(0, [1] * 10, SamplingParams(prompt_logprobs=0), 0, frozenset(), 100)
    assert request.to_score(4) == range(4)
    request.num_computed = request.num_scored = 4
    assert request.to_score(6) == range(4, 9)
    request.restart()
    assert list(request.to_score(4)) == []
    assert request.to_score(7) == range(4, 7)


def test_a_prompt_is_scored_in_steps_that_are_no_longer_than_others() -> None:
    scheduler = Scheduler(SlotPool(400), max_rows=16, max_requests=4, costs=RowCosts(scored=5.0))
    neighbour, scored = new_request(0, 3, 60), SamplingParams(max_tokens=3, prompt_logprobs=0)
    prompts = [Request(number, [2] * 30, scored, number, frozenset({STOP}), 1000) for number in (1, 2)]
    rng, told = np.random.default_rng(0), dict[int, list[int]]()
    neighbour.stop_ids = frozenset()
    add_all(scheduler, (neighbour, *prompts))
    while scheduler.busy:
        decoding = neighbour.finish_reason is None
        step = taken(scheduler, lambda request: guess(request, rng, 4))
        assert step.num_rows + 4 * sum(map(len, step.scored)) <= 16
        assert not decoding or step.chunks[0].request is neighbour
        for chunk, rows in zip(step.chunks, step.scored, strict=True):
            told.setdefault(chunk.request.id, []).extend(rows)
    assert told == {0: [], 1: [*range(29)], 2: [*range(29)]}
    assert len(neighbour.output) == 60 and all(request.finish_reason is not None for request in prompts)


def test_who_shares_a_prompt_waits_until_it_is_scored() -> None:
    """The first one of a group waits itself, for another prompt to be scored."""
    scheduler = Scheduler(SlotPool(200), max_rows=8, max_requests=4, costs=RowCosts(scored=8.0))
    scored, plain = SamplingParams(max_tokens=3, prompt_logprobs=0), SamplingParams(max_tokens=3)
    other = Request(0, [1] * 5, scored, 0, frozenset(), 1000)
    group = [Request(1 + i, [2] * 4, (scored, plain)[i], i, frozenset(), 1000, group=1) for i in range(2)]
    add_all(scheduler, (other, *group))
    assert [(chunk.request, chunk.count) for chunk in scheduler.plan().chunks] == [(other, 1)]
    written = Written()
    while scheduler.busy:
        taken(scheduler, no_guess, written)
    assert [len(request.output) for request in (other, *group)] == [3, 3, 3]


def test_nodes_too_deep_to_be_committed_get_no_row() -> None:
    scheduler = Scheduler(SlotPool(100), max_rows=64, max_requests=1)
    scheduler.add(new_request(0, 3, 3))
    chain = Guesses.chain(range(8), [-0.1] * 8, "ngram")
    step = scheduler.schedule(scheduler.plan().chunks, Forest.of([chain]), 1000)
    assert step.forest.nodes.depths.max() == 2  # two nodes and the bonus token make three


def test_a_request_that_came_back_alone_is_drafted_for() -> None:
    """All slots are reserved for it: its trees borrow them."""
    scheduler = Scheduler(SlotPool(40), max_rows=64, max_requests=2)
    request = Request(0, [1] * 5, SamplingParams(max_tokens=35), 0, frozenset(), 1000)
    request.restart()
    scheduler.add(request)
    rng = np.random.default_rng(0)
    step = advance(scheduler, rng, 12)
    assert step is not None and len(step.forest) > 0
    while scheduler.busy:
        advance(scheduler, rng, 12)
        scheduler.check()
    assert scheduler.pool.num_free == 40


# -- requests of one prompt


def samples_of(count: int, prompt: int, max_tokens: int, first: int = 0) -> list[Request]:
    """Requests that differ in their seeds."""
    numbers = range(first, first + count)
    params = SamplingParams(max_tokens=max_tokens)
    return [Request(n, [1] * prompt, params, 1000 + n, frozenset({STOP}), 1000, group=first) for n in numbers]


def finish(scheduler: Scheduler, nodes: int = 0, written: Written | None = None) -> int:
    """Run to the end; the rows of committed tokens that were computed."""
    rng, computed = np.random.default_rng(0), 0
    while scheduler.busy:
        step = taken(scheduler, lambda request: guess(request, rng, nodes) if nodes else Guesses(), written)
        computed += step.num_rows - len(step.forest)
    return computed


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize(("prompt", "max_rows"), [(100, 200), (100, 30), (10, 30)])
def test_samples_of_a_prompt_compute_it_once(prompt: int, max_rows: int, window: int) -> None:
    scheduler = Scheduler(SlotPool(600, window), max_rows=max_rows, max_requests=8)
    requests = samples_of(8, prompt, max_tokens=60)
    add_all(scheduler, requests)
    computed = finish(scheduler, written=Written())
    assert [r.output for r in requests] == [alone(r) for r in requests]
    assert computed == prompt + sum(len(r.output) - 1 for r in requests)
    assert scheduler.pool.num_free == 600


def test_a_sample_that_comes_when_the_prompts_slots_are_given_back_computes_it() -> None:
    scheduler = Scheduler(SlotPool(400, window=10), max_rows=200, max_requests=2)
    requests = samples_of(8, prompt=100, max_tokens=40)
    add_all(scheduler, requests)
    finish(scheduler, written=Written())
    assert [r.output for r in requests] == [alone(r) for r in requests]


def test_long_prompts_count_as_what_they_may_hold() -> None:
    scheduler = Scheduler(SlotPool(48, window=9), max_rows=16, max_requests=4)
    add_all(scheduler, [new_request(number, 200, 5) for number in range(3)])
    scheduler.plan()
    assert len(scheduler.running) == 2


def test_a_sample_that_comes_late_computes_one_row_of_the_prompt() -> None:
    scheduler = Scheduler(SlotPool(400), max_rows=200, max_requests=2)
    requests = samples_of(5, prompt=100, max_tokens=20)
    add_all(scheduler, requests)
    computed = finish(scheduler, nodes=0)
    assert [r.output for r in requests] == [alone(r) for r in requests]
    late = computed - 100 - sum(len(r.output) - 1 for r in requests)
    assert 0 < late <= 3  # a row each, as long as another one runs


@given(
    data=st.data(),
    capacity=st.integers(40, 120),
    max_rows=st.integers(4, 40),
    max_requests=st.integers(1, 8),
    seed=st.integers(0, 1 << 32),
    window=st.sampled_from([0, 0, 1, 4, 12]),
    cached=st.booleans(),
)
@settings(max_examples=sized(20, 100))
def test_shared_prompts_survive_aborts_and_preemption(
    data: st.DataObject, capacity: int, max_rows: int, max_requests: int, seed: int, window: int, cached: bool
) -> None:
    pool, rng, written = SlotPool(capacity, window), np.random.default_rng(seed), Written()
    scheduler = Scheduler(pool, max_rows, max_requests, PrefixCache(pool) if cached else None)
    scheduler.headroom = 1
    requests: list[Request] = []
    for _ in range(data.draw(st.integers(1, 4))):
        count, prompt, max_tokens = (data.draw(st.integers(1, most)) for most in (4, 20, 12))
        requests += samples_of(count, prompt, max_tokens, first=len(requests))
    add_all(scheduler, requests)
    for _ in range(data.draw(st.integers(0, 6))):
        if scheduler.busy:
            taken(scheduler, lambda request: guess(request, rng, 4), written, ends=data.draw(st.booleans()))
        scheduler.abort(requests[data.draw(st.integers(0, len(requests) - 1))])
        scheduler.check()
    finish(scheduler, nodes=4, written=written)
    assert scheduler.pool.num_available == capacity
    for request, expected in zip(requests, [alone(r) for r in requests], strict=True):
        assert request.finish_reason is not None
        if request.finish_reason is FinishReason.ABORT:
            expected = expected[: len(request.output)]
        assert request.output == expected


def known_and_unknown(count: int) -> tuple[Scheduler, Request, list[Request], list[Request]]:
    """A scheduler of one request at a time; one that it runs; `count` in the queue that nobody knows, and as many after
    them that begin as the first one did."""
    scheduler = Scheduler(pool := SlotPool(4000), 4000, 1, PrefixCache(pool))
    params, shared = SamplingParams(max_tokens=1), [1] * 50
    first = Request(0, shared, params, 0, frozenset(), 1000)
    unknown = [Request(1 + i, [2 + i] * 60, params, 0, frozenset(), 1000) for i in range(count)]
    known = [Request(100 + i, [*shared, i], params, 0, frozenset(), 1000) for i in range(count)]
    add_all(scheduler, (first, *unknown, *known))
    return scheduler, first, unknown, known


def order_of(scheduler: Scheduler) -> list[Request]:
    """Who runs, one after the other."""
    order, rng = list[Request](), np.random.default_rng(0)
    while scheduler.busy:
        step = advance(scheduler, rng, 0)
        assert step is not None
        order += [chunk.request for chunk in step.chunks]
    return order


def test_nobody_is_passed_over_for_ever() -> None:
    scheduler, first, unknown, known = known_and_unknown(15)
    order = order_of(scheduler)
    assert order[0] is first and set(order[1:9]) <= set(known)
    assert [request for request in order if request in unknown] == unknown
    assert order.index(unknown[0]) == 1 + MAX_PASSED_OVER == 1 + max(request.passed_over for request in unknown)


def test_a_little_that_is_cached_changes_nothing() -> None:
    scheduler, first, unknown, known = known_and_unknown(3)
    for request in (*unknown, *known):
        scheduler.abort(request)
    late = [Request(200 + i, [1] * i + [9] * 60, SamplingParams(max_tokens=1), 0, frozenset(), 1000) for i in range(3)]
    add_all(scheduler, late)
    assert order_of(scheduler) == [first, *late]


def test_outputs_of_one_prompt_own_what_the_cache_has_of_it() -> None:
    """Another request's prompt becomes known while the group's first computes the same tokens. An owner of a run owns
    all above: what hangs below an idle run could not be evicted with it, and slots that count as available would not
    be had."""
    pool = SlotPool(40)
    scheduler = Scheduler(pool, 9, 4, PrefixCache(pool))
    prompt = [0, 1, 2, 0, 1, 2, 0, 1]

    def added(number: int, tokens: list[int], group: int) -> Request:
        request = Request(number, tokens, SamplingParams(max_tokens=8), number, frozenset(), 100, group=group)
        scheduler.add(request)
        return request

    other, group = added(0, prompt[:4], 0), [added(number, prompt, 1) for number in (1, 2, 3)]
    taken(scheduler, no_guess)
    scheduler.abort(other)
    assert not group[0].output and group[0].num_computed == 3
    taken(scheduler, no_guess)
    assert all(len(request.output) == 1 for request in group)
    known = scheduler.cache.match(None, prompt).tolist()
    assert [request.slots[: len(prompt)].tolist() for request in group] == [known] * 3
    scheduler.abort(group[0])
    scheduler.cache.evict(pool.num_idle)
    assert pool.num_free == pool.num_available
    scheduler.check()
