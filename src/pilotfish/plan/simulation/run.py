"""Simulations: requests through targets and drafts in virtual time, and what came of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pilotfish.core.drafting.drafter import Drafter
from pilotfish.core.drafting.messages import ToDraft, ToTarget
from pilotfish.core.drafting.shadow import ShadowScore
from pilotfish.core.peers.fields import Peer
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import Request, RequestStats
from pilotfish.core.scheduling.step import RequestCommit
from pilotfish.plan.simulation.acceptance import AcceptanceTrace
from pilotfish.plan.simulation.drafts import PooledDrafter, PoolUse, VirtualPool, local_drafter, pool_peer, with_ngrams
from pilotfish.plan.simulation.events import Events
from pilotfish.plan.simulation.models import Replay
from pilotfish.plan.simulation.setup import LoadItem, Setup, SimulatedLoad
from pilotfish.plan.simulation.shadows import SimulatedShadow, VirtualShadow
from pilotfish.plan.simulation.simulated import VirtualClock
from pilotfish.plan.simulation.target import VirtualTarget
from pilotfish.workers.records import StepRecord

#: Seconds between two looks of both sides at the time.
TICK = 0.05


@dataclass
class SimulatedTimes:
    """A request's, in seconds."""

    came: float
    target: int  # which of them
    first: float = 0.0  # its first token
    ended: float = 0.0
    tokens: int = 0


@dataclass(frozen=True)
class SimulatedRun:
    requests: list[SimulatedTimes]
    stats: list[RequestStats]  # of each
    steps: list[list[StepRecord]]  # of each target
    pools: list[PoolUse]
    shadows: list[ShadowScore]  # of each target, of all rounds

    @property
    def seconds(self) -> float:
        return max(request.ended for request in self.requests) - min(request.came for request in self.requests)

    @property
    def tokens_per_second(self) -> float:
        """Of all targets."""
        return sum(request.tokens for request in self.requests) / self.seconds

    @property
    def tokens_per_step(self) -> float:
        """Of a sequence."""
        return sum(r.tokens for r in self.requests) / max(sum(stats.verify_steps for stats in self.stats), 1)


def simulate(
    setup: Setup,
    trace: AcceptanceTrace,
    load: SimulatedLoad,
    rounds: int = 1,
    shadow: SimulatedShadow | None = None,
) -> SimulatedRun:
    """Requests go to the targets in turn. The load is played so many times; figures are of the last, as the first ones
    are for budgets and drafts to learn. Each target has a `shadow`, which goes on after the last request until it has
    no more to follow."""
    simulation = _Simulation(setup, trace, shadow)
    for _ in range(rounds):
        simulated = simulation.play(load)
    return simulated


class _Simulation:
    def __init__(self, setup: Setup, trace: AcceptanceTrace, shadow: SimulatedShadow | None = None) -> None:
        self._setup, self._trace = setup, trace
        self._events, self._replay = Events(), Replay(trace)
        self._left, self._concurrency = deque[LoadItem](), 0
        self.requests: list[Request] = []  # by their ids, which are also their seeds
        self._times: list[SimulatedTimes] = []  # likewise
        self._running = 0
        self._drafters: list[PooledDrafter] = []  # async, of each target
        self._pools = [
            VirtualPool(self._events, self._replay, setup, partial(self._to_target, pool_peer(number)))
            for number in range(setup.pools if setup.speculation.mode == "async" else 0)
        ]
        self._targets = [self._make_target(number) for number in range(setup.targets)]
        self._steps = [list[StepRecord]() for _ in self._targets]
        self._shadows: list[VirtualShadow] = []  # of each target, or none
        if shadow is not None:
            made = (VirtualShadow(self._events, self._replay, setup, shadow, target) for target in self._targets)
            self._shadows += made
        for number, target in enumerate(self._targets):
            target.worker.observe = partial(self._observed, number)

        self._tick()
        drafts: list[PooledDrafter | VirtualShadow] = [*self._drafters, *self._shadows]
        self._events.run(until=lambda: all(draft.ready for draft in drafts))

    def play(self, load: SimulatedLoad) -> SimulatedRun:
        """To its end."""
        first, before = len(self.requests), [pool.use for pool in self._pools]
        for steps in self._steps:
            steps.clear()
        self._left, self._concurrency = deque(load.items), load.concurrency
        self._begin()
        self._events.run(until=lambda: not self._left and not self._running)
        stats = [request.stats for request in self.requests[first:]]
        uses = [pool.use.since(earlier) for pool, earlier in zip(self._pools, before, strict=True)]
        self._events.run(until=lambda: not any(shadow.busy for shadow in self._shadows))
        scores = [shadow.score for shadow in self._shadows]
        return SimulatedRun(self._times[first:], stats, [list(steps) for steps in self._steps], uses, scores)

    def _begin(self) -> None:
        if self._concurrency:
            for number in range(min(self._concurrency, len(self._left))):
                self._submit(number % len(self._targets))
        else:
            for number, item in enumerate(self._left):
                self._events.at(self._events.now + item.at, partial(self._submit, number % len(self._targets)))

    def _submit(self, target: int) -> None:
        """The next request goes there."""
        item, now, own = self._left.popleft(), self._events.now, self._targets[target]
        prompt = self._trace.prompts[item.sequence]
        seed = self._replay.add(item.sequence, len(prompt))
        params = SamplingParams(temperature=self._trace.pair.temperature, max_tokens=item.output)
        request = Request(seed, prompt, params, seed, frozenset(), self._setup.context - len(prompt))
        self.requests.append(request)
        self._times.append(SimulatedTimes(now, target))
        self._running += 1
        own.submit(request)

    def _committed(self, commit: RequestCommit) -> None:
        times, now = self._times[commit.request.id], self._events.now
        if commit.tokens and not times.tokens:
            times.first = now
        times.tokens += len(commit.tokens)
        if commit.request.finish_reason is not None:
            for shadow in self._shadows[times.target : times.target + 1]:
                shadow.ended(commit.request)
            times.ended = now
            self._running -= 1
            if self._concurrency and self._left:
                self._submit(times.target)

    def _observed(self, target: int, step: StepRecord) -> None:
        self._steps[target].append(step)
        for shadow in self._shadows[target : target + 1]:
            shadow.observe(step)

    # -- between targets and pools

    def _make_target(self, number: int) -> VirtualTarget:
        def make(clock: VirtualClock) -> Drafter:
            if not self._pools:
                return local_drafter(self._replay, self._setup, clock)
            post = partial(self._to_pool, _target_peer(number))
            self._drafters.append(PooledDrafter(self._setup, number, self._trace.pair.vocab_size, clock, post))
            return with_ngrams(self._drafters[-1], self._setup)

        return VirtualTarget(self._events, self._replay, self._setup, make, self._committed)

    def _to_pool(self, sender: Peer, receiver: Peer, message: ToDraft) -> None:
        pool = self._pools[[pool_peer(number) for number in range(len(self._pools))].index(receiver)]
        self._later(partial(pool.deliver, sender, message))

    def _to_target(self, sender: Peer, receiver: Peer, message: ToTarget) -> None:
        drafter = self._drafters[[_target_peer(number) for number in range(len(self._targets))].index(receiver)]
        self._later(lambda: drafter.receive(sender, message, self._events.now))

    def _later(self, deliver: Callable[[], None]) -> None:
        self._events.at(self._events.now + self._setup.host.hop + self._setup.delay, deliver)

    def _tick(self) -> None:
        for drafter in self._drafters:
            drafter.tick(self._events.now)
        for pool in self._pools:
            pool.tick()
        for shadow in self._shadows:
            shadow.tick(self._events.now)
        if self._pools or self._shadows:
            self._events.at(self._events.now + TICK, self._tick)


def _target_peer(number: int) -> Peer:
    return b"target %d" % number
