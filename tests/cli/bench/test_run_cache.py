"""The cache of runs beside the engine's own, over tokens and slots."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from fleets.run_cache import KnownRun, RunCache
from fleets.traffic import ConversationTraffic, SimulatedRequest, run_id

from pilotfish.core.cache.prefix_cache import PROVEN_SHARE, PrefixCache
from pilotfish.core.cache.slots import SlotPool


def traffic(seed: int, tenants: int = 3) -> list[SimulatedRequest]:
    """Short conversations of tenants."""
    return list(
        ConversationTraffic(
            rate=1.0,
            seconds=400.0,
            seed=seed,
            tenants=tenants,
            system_tokens=30,
            first_tokens=(3.5, 1.0),
            output_tokens=(2.5, 0.5),
            next_tokens=(2.0, 1.0),
            pause=(3.0, 0.5),
            longest_prompt=600,
            longest_output=60,
        )
    )


def tokens_of(requests: list[SimulatedRequest]) -> dict[bytes, list[int]]:
    """Tokens that no two runs share, of each run."""
    lengths: dict[bytes, int] = {}
    for request in requests:
        begins = (0, *request.ends)
        lengths |= {run: end - begin for run, begin, end in zip(request.runs, begins, request.ends, strict=False)}
        lengths[request.output_run] = request.output
    first, found = 0, {}
    for run, length in lengths.items():
        found[run] = list(range(first, first + length))
        first += length
    return found


class Real:
    """Requests one at a time through the engine's cache, as its scheduler has them."""

    def __init__(self, capacity: int, proven_share: float) -> None:
        self.pool = SlotPool(capacity)
        self.cache = PrefixCache(self.pool, proven_share)

    def serve(self, prompt: list[int], output: list[int]) -> int:
        """Tokens that were found."""
        shared = self.cache.match(None, prompt[:-1])
        self.pool.share(shared)
        slots = np.concatenate((shared, self.cache.allocate(len(prompt) + len(output) - len(shared))))
        slots[: len(prompt)] = self.cache.insert(None, prompt, slots[: len(prompt)])
        slots = self.cache.insert(None, prompt + output, slots)
        self.pool.release(slots)
        return len(shared)


def serve(cache: RunCache, request: SimulatedRequest) -> int:
    found, path = cache.admit(request)
    cache.computed(request, found, path)
    cache.ended(request, path)
    return found


def ignored(run: KnownRun, before: int) -> None:
    pass


@pytest.mark.parametrize("capacity", [700, 2000, 10**6])
@pytest.mark.parametrize("proven_share", [0.0, PROVEN_SHARE])
def test_it_finds_what_the_engines_cache_finds(capacity: int, proven_share: float) -> None:
    """Request by request. Where runs are proven up to a share and evicted, they are cut in other places: then all of
    them together find as much, up to 0.5 % of the prompts."""
    found, known, prompts = 0, 0, 0
    for seed in range(3):
        requests = traffic(seed)
        tokens = tokens_of(requests)
        real, cache = Real(capacity, proven_share), RunCache(capacity, ignored, proven_share)
        for request in requests:
            prompt = list(chain.from_iterable(tokens[run] for run in request.runs))
            expected, own = real.serve(prompt, tokens[request.output_run]), serve(cache, request)
            assert own == expected or (proven_share and capacity < 10**6)
            found, known, prompts = found + own, known + expected, prompts + len(prompt)
        cache.check()
    assert found == pytest.approx(known, abs=prompts / 200) and known > prompts / 10


def test_what_a_request_owns_is_not_evicted() -> None:
    requests = traffic(0)
    cache = RunCache(max(r.tokens + r.output for r in requests), ignored)
    first, rest = requests[0], requests[1:]
    found, path = cache.admit(first)
    cache.computed(first, found, path)
    for request in rest:
        if cache.room(request):
            serve(cache, request)
        cache.check()
        assert cache.known(first) == first.tokens - 1
    cache.ended(first, path)
    cache.check()
    assert cache.live == 0


def test_whoever_is_told_of_changes_knows_what_there_is() -> None:
    ends: dict[bytes, int] = {}

    def changed(run: KnownRun, before: int) -> None:
        assert before == ends.get(run.id, run.begin)
        ends[run.id] = run.end
        if not run.tokens:
            del ends[run.id]

    cache = RunCache(700, changed)
    for request in traffic(0):
        serve(cache, request)
        known = [ends[run] for run in request.runs if run in ends]
        assert min(max(known), request.tokens - 1) == cache.known(request)
    assert run_id(0) in ends
