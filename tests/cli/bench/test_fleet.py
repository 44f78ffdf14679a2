"""A simulated fleet and its cache beside the engine's own scheduler and cache in virtual time, and on their own."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
from fleets.baselines import PowerOfTwo, RoundRobin
from fleets.fleet import SimulatedFleet, simulate
from fleets.fleet_plan import FleetPlan, paced_target
from fleets.run_cache import KnownRun, RunCache
from fleets.simulated_pools import Acceptance, DraftPlan, PrefillPlan
from fleets.simulated_server import ServerPlan
from fleets.simulated_target import TargetPlan
from fleets.traffic import ConversationTraffic, RecordedRequest, RecordedTraffic, SimulatedRequest, run_id
from sizes import sized

from pilotfish.core.cache.prefix_cache import PROVEN_SHARE, PrefixCache
from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.drafting.drafter import NoDrafter
from pilotfish.core.routing.router import ReplicaLoad, Router
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.budget import FixedBudget
from pilotfish.core.scheduling.request import Request
from pilotfish.core.scheduling.scheduler import Scheduler
from pilotfish.plan.events import VirtualClock
from pilotfish.plan.simulation.acceptance import AcceptanceTrace, TracedPair
from pilotfish.plan.simulation.models import Replay, ReplayedModel
from pilotfish.workers.target import TargetWorker

SLOTS, ROWS, REQUESTS = 3000, 64, 6
FREE = ServerPlan(0.0, 0.0, 0.0, 0.0, 0.0, most=1 << 20)
ZEROS = AcceptanceTrace(
    TracedPair("zeros", "zeros", 0.0, 2), [[0]], *(np.zeros(shape, np.int64) for shape in (1, 99, (99, 1), (99, 1)))
)
EXACT = Acceptance(gains=((1, 0.5), (4, 1.5)), spread=0.0)


def forward(rows: int) -> float:
    return 0.01 + rows * 0.0005


def target(acceptance: Acceptance | None = None) -> TargetPlan:
    return paced_target([forward(rows) for rows in range(ROWS + 1)], 0.0, SLOTS, REQUESTS, acceptance, host_seconds=0.0)


def traffic(
    rate: float = 3.0, seconds: float = 60.0, tenants: int = 2, system_tokens: int = 64, **lengths: Any
) -> ConversationTraffic:
    usual = {"first_tokens": (4.5, 0.8), "output_tokens": (3.0, 0.5), "next_tokens": (3.0, 1.0), "pause": (2.5, 0.5)}
    usual |= {"rate": rate, "seconds": seconds, "tenants": tenants, "system_tokens": system_tokens}
    return ConversationTraffic(**{**usual, "longest_prompt": 800, "longest_output": 60, **lengths})


class ByScheduler:
    """When each request has its first token and its last one, and what it found, by the engine's own loop."""

    def __init__(self, requests: Sequence[SimulatedRequest]) -> None:
        self.clock, self.pool = VirtualClock(), SlotPool(SLOTS)
        scheduler = Scheduler(self.pool, ROWS, REQUESTS, PrefixCache(self.pool))
        model = ReplayedModel(Replay(ZEROS), lambda load: forward(load.rows), self.clock, SLOTS, SLOTS)
        self.worker = TargetWorker(model, scheduler, NoDrafter(), FixedBudget(0, 0), self.clock)
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}
        self.requests = [self._request(model.replay.add(0, one.tokens), one) for one in requests]
        self._run([one.at for one in requests])

    def _request(self, number: int, one: SimulatedRequest) -> Request:
        """Runs have tokens of their own; the model writes zeros."""
        lengths = np.diff((0, *one.ends)).tolist()
        outputs = {run for i, run in enumerate(one.runs) if i >= 2 and i % 2 == 0}
        parts = [
            [0] * length if run in outputs else [1 + int.from_bytes(run, "little")] * length
            for run, length in zip(one.runs, lengths, strict=True)
        ]
        params = SamplingParams(temperature=0.0, max_tokens=one.output)
        return Request(number, list(chain.from_iterable(parts)), params, number, frozenset(), SLOTS)

    def _run(self, arrivals: Sequence[float]) -> None:
        coming = list(zip(arrivals, self.requests, strict=True))
        while coming or self.worker.scheduler.busy:
            if not self.worker.scheduler.busy:
                self.clock.now = max(self.clock.now, coming[0][0])
            while coming and coming[0][0] <= self.clock.now:
                self.worker.scheduler.add(coming.pop(0)[1])
            for commit in self.worker.step():
                if commit.tokens:
                    self.first.setdefault(commit.request.id, self.clock.now)
                    self.last[commit.request.id] = self.clock.now


@pytest.mark.parametrize("rate", sized([8.0], [4.0, 8.0]))
def test_a_target_is_as_the_engines_scheduler_would_have_it(rate: float) -> None:
    """Half idle, and with a queue."""
    requests = list(traffic(rate))
    real = ByScheduler(requests)
    firsts = [real.first[i] - one.at for i, one in enumerate(requests)]
    figures = simulate(FleetPlan(targets=1, target=target(), server=FREE), requests, RoundRobin)
    assert figures.requests == len(requests) > 150
    assert figures.first_token.p50 == pytest.approx(np.quantile(firsts, 0.5), rel=0.02)
    assert figures.first_token.p95 == pytest.approx(np.quantile(firsts, 0.95), rel=0.02)
    found = sum(one.stats.cached_tokens for one in real.requests)
    assert figures.hit_rate == pytest.approx(found / sum(one.tokens for one in requests), abs=0.005)
    seconds = [(real.last[i] - real.first[i]) / (one.output - 1) for i, one in enumerate(requests) if one.output > 1]
    assert figures.token.p50 == pytest.approx(np.quantile(seconds, 0.5), rel=0.05)


def fleet(targets: int, **parts: Any) -> FleetPlan:
    return FleetPlan(**{"targets": targets, "target": target(), "server": FREE, "acceptance": EXACT, **parts})


def test_requests_go_where_their_prefix_is() -> None:
    """So that more is found, and the first token comes sooner; what routing believed is what was there."""
    requests = list(traffic(16.0, tenants=30, system_tokens=400))
    turns, drawn, found = (simulate(fleet(4, servers=2), requests, r) for r in (RoundRobin, PowerOfTwo, Router))
    assert found.hit_rate > 1.1 * max(turns.hit_rate, drawn.hit_rate)
    assert found.first_token.p50 < turns.first_token.p50
    assert found.predicted == pytest.approx(found.hit_rate, abs=0.05)
    assert turns.predicted == 0 and turns.requests == drawn.requests == found.requests == len(requests)


def test_nothing_is_lost_and_all_is_freed() -> None:
    plan = fleet(3, target=target(EXACT), draft_pools=1, draft=DraftPlan(1e4, 10**6, 1e-6))
    simulated, requests = SimulatedFleet(plan, Router), list(traffic(12.0))
    figures = simulated.run(requests)
    assert figures.requests == len(requests) and figures.refused == 0
    for one in simulated.targets:
        one.cache.check()
        assert one.load == ReplicaLoad(0, 0, 0, one.plan.max_requests) and one.running == 0
    assert [pool.sessions for pool in simulated.drafts] == [0] and simulated.drafts[0].context == 0
    assert [server.requests for server in simulated.servers] == [0]


def test_guesses_are_as_many_as_drafts_have_time_and_room_for() -> None:
    plenty, slow, small = (
        simulate(fleet(2, target=target(EXACT), draft_pools=1, draft=draft), traffic(4.0), RoundRobin)
        for draft in (DraftPlan(1e6, 10**6, 0.0), DraftPlan(10.0, 10**6, 0.0), DraftPlan(1e6, 100, 0.0))
    )
    alone = simulate(fleet(2), traffic(4.0), RoundRobin)
    assert plenty.token.p50 < 0.6 * alone.token.p50
    assert plenty.token.p50 < slow.token.p50 <= 1.1 * alone.token.p50
    assert plenty.token.p50 < small.token.p50 <= 1.1 * alone.token.p50
    assert slow.busy_drafts > 0.3 > plenty.busy_drafts


def test_prompts_that_others_compute_sooner_delay_nobody() -> None:
    prefill = PrefillPlan(token_seconds=0.0002, transfer_seconds=0.0)
    own = simulate(fleet(2), traffic(12.0), RoundRobin)
    elsewhere = simulate(fleet(2, prefill=prefill, prefill_workers=2), traffic(12.0), RoundRobin)
    assert elsewhere.first_token.p95 < own.first_token.p95 and elsewhere.token.p95 < own.token.p95
    assert elsewhere.requests == own.requests and 0.05 < elsewhere.busy_prefills < 1


def test_a_server_that_has_enough_to_do_refuses_and_is_late() -> None:
    full = replace(FREE, most=2)
    assert simulate(fleet(1, server=full), traffic(8.0), RoundRobin).refused > 50
    slow = replace(FREE, request_seconds=0.1, event_seconds=0.001)
    one, two = (simulate(fleet(4, server=slow, servers=n), traffic(8.0), RoundRobin) for n in (1, 2))
    assert one.busy_servers == pytest.approx(2 * two.busy_servers, rel=0.01)
    assert one.first_token.p50 > two.first_token.p50 > 0.1


TRACE = [
    RecordedRequest(0.0, 1200, 10, (0, 1, 2)),
    RecordedRequest(1.0, 1100, 10, (0, 3, 4)),
    RecordedRequest(4.0, 1700, 0, (0, 1, 5, 6)),
    RecordedRequest(6.0, 500, 10, (0,)),
]


def test_runs_of_a_trace_are_blocks_that_come_one_after_the_other() -> None:
    requests = list(RecordedTraffic(TRACE, 1, 7.0, 512))
    first, second, third, fourth = requests
    assert [one.ends for one in requests] == [(512, 1024, 1200), (512, 1100), (512, 1024, 1700), (500,)]
    assert first.runs[:2] == third.runs[:2] and first.runs[0] == second.runs[0] == fourth.runs[0]
    assert first.session == third.session != second.session
    assert third.output == 1 and len({one.output_run for one in requests}) == 4


# -- the cache of runs, over tokens and slots


def runs(seed: int) -> list[SimulatedRequest]:
    """Short conversations."""
    lengths: dict[str, Any] = {"first_tokens": (3.5, 1.0), "output_tokens": (2.5, 0.5), "next_tokens": (2.0, 1.0)}
    return list(traffic(1.0, 400.0, 3, 30, seed=seed, pause=(3.0, 0.5), longest_prompt=600, **lengths))


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


@pytest.mark.parametrize("capacity", [700, 2000, 10**6])
@pytest.mark.parametrize("proven_share", [0.0, PROVEN_SHARE])
def test_it_finds_what_the_engines_cache_finds(capacity: int, proven_share: float) -> None:
    """Request by request. Where runs are proven up to a share and evicted, they are cut in other places: then all of
    them together find as much, up to 0.5 % of the prompts."""
    found, known, prompts = 0, 0, 0
    for seed in range(3):
        requests = runs(seed)
        tokens = tokens_of(requests)
        real, cache = Real(capacity, proven_share), RunCache(capacity, lambda *_: None, proven_share)
        for request in requests:
            prompt = list(chain.from_iterable(tokens[run] for run in request.runs))
            expected, own = real.serve(prompt, tokens[request.output_run]), serve(cache, request)
            assert own == expected or (proven_share and capacity < 10**6)
            found, known, prompts = found + own, known + expected, prompts + len(prompt)
        cache.check()
    assert found == pytest.approx(known, abs=prompts / 200) and known > prompts / 10


def test_whoever_is_told_of_changes_knows_what_there_is() -> None:
    ends: dict[bytes, int] = {}

    def changed(run: KnownRun, before: int) -> None:
        assert before == ends.get(run.id, run.begin)
        ends[run.id] = run.end
        if not run.tokens:
            del ends[run.id]

    cache = RunCache(700, changed)
    for request in runs(0):
        serve(cache, request)
        known = [ends[run] for run in request.runs if run in ends]
        assert min(max(known), request.tokens - 1) == cache.known(request)
    assert run_id(0) in ends
