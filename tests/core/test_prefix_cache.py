"""The prefix cache: what it gives is KV of those very tokens under that very salt; nothing that is owned is evicted."""

from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sizes import sized

from pilotfish.core.cache import prefix_keys
from pilotfish.core.cache.prefix_cache import PrefixCache
from pilotfish.core.cache.slots import GONE, SlotPool, Slots, present
from pilotfish.core.routing import held_prefixes
from pilotfish.core.routing.held_prefixes import HeldRuns, RoutingKey, routing_keys
from pilotfish.errors import EngineError

CAPACITY = 24
SALTS = (None, "a", "b")
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
#: Tokens of a routing key.
PAGE = 2


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (prefix_keys, held_prefixes):
        monkeypatch.setattr(module, "OBJECT_TOKENS", PAGE)


Prefix: TypeAlias = tuple[str | None, tuple[int, ...]]


@cache
def key_of(prefix: Prefix) -> RoutingKey:
    return routing_keys(*prefix)[-1]


def check_held(held: HeldRuns, known: set[Prefix], window: int = CAPACITY) -> None:
    """Servers are told of the prefixes of whole pages whose next row finds all that it sees."""
    pages = {prefix for prefix in known if len(prefix[1]) % PAGE == 0}
    seen = {(salt, tokens): range(max(len(tokens) - window + 1, 0), len(tokens)) for salt, tokens in pages}
    whole = {one for one in pages if all((one[0], one[1][: place + 1]) in known for place in seen[one])}
    assert held.prefixes._keys == set(map(key_of, whole))


def request(pool: SlotPool, cache: PrefixCache, tokens: Sequence[int]) -> int:
    """A request that comes alone and leaves all it has computed; how many tokens it found."""
    shared = cache.match(None, tokens)
    pool.share(shared)
    slots = np.concatenate((shared, cache.allocate(len(tokens) - len(shared))))
    pool.release(cache.insert(None, tokens, slots))
    return len(shared)


class CacheMachine(RuleBasedStateMachine):
    """Requests come, share what is known, compute the rest, and leave it, or nothing; in a pool with a window they give
    back what no row of theirs will see, and find what is whole. `written` is what a device would have in each slot: the
    salt, and the tokens up to its own."""

    @initialize(proven_share=st.sampled_from([0, 0.2, 0.6, 1]), window=st.sampled_from([0, 0, 0, 1, 2, 3, 4, 6]))
    def begin(self, proven_share: float, window: int) -> None:
        self.pool = SlotPool(CAPACITY, window)
        self.cache = PrefixCache(self.pool, proven_share)
        self.held = HeldRuns(self.cache)
        self.written: dict[int, tuple[str | None, tuple[int, ...]]] = {}
        self.running: list[tuple[str | None, list[int], Slots]] = []

    def reusable(self, salt: str | None, tokens: list[int]) -> int:
        """Of the longest prefix whose next row finds all that it sees."""
        known = {self.written[slot] for slot in self.cache.slots}
        there = [(salt, tuple(tokens[: place + 1])) in known for place in range(len(tokens))]
        return max(n for n in range(len(tokens) + 1) if all(there[self.pool.first_seen(n) : n]))

    @rule(salt=st.sampled_from(SALTS), tokens=TOKENS)
    def arrive(self, salt: str | None, tokens: list[int]) -> None:
        expected, known = self.reusable(salt, tokens), self.cache.num_known(salt, tokens)
        shared = self.cache.match(salt, tokens)
        assert len(shared) == known
        assert known == expected or (self.pool.window == 1 and len(shared) < expected)
        for place, slot in enumerate(shared.tolist()):
            gone = place < self.pool.first_seen(len(shared))
            assert slot == GONE if gone else self.written[slot] == (salt, tuple(tokens[: place + 1]))
        self.pool.share(present(shared))
        missing = len(tokens) - len(shared)
        if missing > self.pool.num_available:
            self.pool.release(present(shared))
            return
        own = self.cache.allocate(missing)
        for length, slot in enumerate(own.tolist(), len(shared) + 1):
            self.written[slot] = (salt, tuple(tokens[:length]))
        self.running.append((salt, tokens, np.concatenate((shared, own))))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """All that it may, or a part."""
        _, tokens, slots = self.running[data.draw(st.integers(0, len(self.running) - 1))]
        count = data.draw(st.integers(0, self.pool.first_seen(len(tokens))))
        self.pool.release(present(slots[:count]))
        slots[:count] = GONE

    @precondition(lambda self: self.running)
    @rule(data=st.data(), leaves=st.sampled_from(["all", "a part", "nothing"]))
    def end(self, data: st.DataObject, leaves: str) -> None:
        salt, tokens, slots = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        count = {"all": len(tokens), "a part": len(tokens) // 2, "nothing": 0}[leaves]
        slots = np.concatenate((self.cache.insert(salt, tokens[:count], slots[:count]), slots[count:]))
        if leaves != "nothing" and GONE not in slots[self.pool.first_seen(count) : count] and self.pool.window != 1:
            assert len(self.cache.match(salt, tokens)) >= count
        self.pool.release(present(slots))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        """Known while it runs."""
        place = data.draw(st.integers(0, len(self.running) - 1))
        salt, tokens, slots = self.running[place]
        self.running[place] = salt, tokens, self.cache.insert(salt, tokens, slots)

    @rule(count=st.integers(0, CAPACITY))
    def evict(self, count: int) -> None:
        idle = self.pool.num_idle
        assert self.cache.evict(count) == min(count, idle)

    @invariant()
    def nothing_is_lost(self) -> None:
        held = [slot for *_, slots in self.running for slot in present(slots).tolist()]
        self.pool.check(held, self.cache.slots)
        self.cache.check()
        if self.pool.window != 1:  # or a row sees itself alone, and any text is reusable
            check_held(self.held, {self.written[slot] for slot in self.cache.slots}, self.pool.window or CAPACITY)

    def teardown(self) -> None:
        """Once nobody owns any the cache can be emptied, of tokens too."""
        if hasattr(self, "pool"):
            # Who watches from now on knows as much as who has watched from the beginning.
            assert HeldRuns(self.cache).prefixes._keys == self.held.prefixes._keys
            self.cache.watcher = self.held
            for *_, slots in self.running:
                self.pool.release(present(slots))
            self.cache.evict(CAPACITY)
            assert self.pool.num_free == CAPACITY and not self.held.prefixes._keys


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=sized(25, 400), stateful_step_count=45)


def test_runs_lose_their_beginning_first_and_stay_reusable() -> None:
    pool = SlotPool(20, window=4)
    cache, tokens = PrefixCache(pool, proven_share=0), list(range(10))
    pool.release(cache.insert(None, tokens, pool.allocate(len(tokens))))
    assert cache.evict(7) == 7
    assert [len(cache.match(None, tokens[:n])) for n in (10, 9, 3)] == [10, 0, 0]
    assert cache.evict(1) == 1 and len(cache.match(None, tokens)) == 0
    assert cache.evict(5) == 2 and pool.num_free == 20 and not cache._roots


@pytest.mark.parametrize("proven_share", [0, 0.2])
def test_prompts_that_nobody_repeats_drive_out_what_many_begin_with_only_without_a_share(proven_share: float) -> None:
    pool = SlotPool(100)
    cache, shared = PrefixCache(pool, proven_share), list(range(15))
    for user in range(3):
        request(pool, cache, [*shared, 100 + user])
    found = [request(pool, cache, [1000 * n + k for k in range(1, 21)]) for n in range(1, 30)]
    assert found == [0] * 29
    assert len(cache.match(None, shared)) == (15 if proven_share else 0)


def test_what_was_found_longest_ago_is_fresh_again_beyond_the_share() -> None:
    pool = SlotPool(100)
    cache = PrefixCache(pool, proven_share=0.2)
    prefixes = [[1000 * n + k for k in range(10)] for n in range(1, 4)]
    for prefix in [*prefixes, *prefixes]:  # the second of each finds the first; two of three fit into the share
        request(pool, cache, prefix)
    for n in range(10, 30):
        request(pool, cache, [1000 * n + k for k in range(1, 21)])
    assert [len(cache.match(None, prefix)) for prefix in prefixes] == [0, 10, 10]


@given(prompts=st.lists(TOKENS, max_size=60), capacity=st.integers(12, 30))
def test_without_a_share_it_is_a_list_of_prefixes_by_last_use(prompts: list[list[int]], capacity: int) -> None:
    pool, known = SlotPool(capacity), OrderedDict[tuple[int, ...], None]()
    cache = PrefixCache(pool, proven_share=0)
    for tokens in prompts:
        prefixes = [tuple(tokens[:length]) for length in range(len(tokens), 0, -1)]
        assert request(pool, cache, tokens) == sum(prefix in known for prefix in prefixes)
        for prefix in prefixes:
            known[prefix] = None
            known.move_to_end(prefix)
        while len(known) > capacity:
            known.popitem(last=False)
        assert len(known) == len(cache.slots)


def test_slots_that_are_not_live_cannot_be_known() -> None:
    pool = SlotPool(8)
    slots = pool.allocate(2)
    pool.release(slots)
    with pytest.raises(EngineError, match="must be live"):
        PrefixCache(pool).insert(None, [1, 2], slots)


# -- a pool's slots: free or live, never both, never neither; live as long as they have an owner


def test_what_a_pool_cannot_do_is_refused_and_changes_nothing() -> None:
    pool = SlotPool(3)
    slots = pool.allocate(2)
    with pytest.raises(EngineError, match="2 asked for, 1 of 3 free"):
        pool.allocate(2)
    with pytest.raises(EngineError, match="released twice"):
        pool.release([slots[0], slots[0]])
    pool.check(slots)
    pool.release(slots)
    with pytest.raises(EngineError, match="released twice"):
        pool.release(slots)
    with pytest.raises(EngineError, match="a free slot cannot be shared"):
        pool.share(slots)
    pool.check([])


@pytest.mark.parametrize("live", [[], [0], [0, 1, 2], [0, 0]])
def test_check_finds_lost_and_shared_slots(live: list[int]) -> None:
    pool = SlotPool(4)
    assert sorted(pool.allocate(2)) == [0, 1]
    with pytest.raises(EngineError, match="slots"):
        pool.check(live)


@given(steps=st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 6)), max_size=60))
def test_a_slot_is_free_when_its_last_owner_gave_it_back(steps: list[tuple[str, int]]) -> None:
    pool, held = SlotPool(CAPACITY), list[list[int]]()  # what each owner holds
    for action, number in steps:
        if action == "allocate" and number <= pool.num_free:
            held.append(pool.allocate(number).tolist())
            assert not set(held[-1]) & {slot for owned in held[:-1] for slot in owned}
        elif action == "share" and held:
            held.append(held[number % len(held)][:])
            pool.share(np.array(held[-1], np.int32))
        elif action == "release" and held:
            pool.release(held.pop(number % len(held)))
        live = [slot for owned in held for slot in owned]
        assert pool.num_free == CAPACITY - len(set(live))
        pool.check(live)
