from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pilotfish.core.drafting.drafter import Drafter
from pilotfish.core.drafting.messages import ToDraft, ToTarget
from pilotfish.core.peers.fields import Peer
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import Request, RequestStats
from pilotfish.core.scheduling.step import RequestCommit
from pilotfish.plan.events import Events, VirtualClock
from pilotfish.plan.simulation.acceptance import AcceptanceTrace
from pilotfish.plan.simulation.drafts import PooledDrafter, VirtualPool, local_drafter, pool_peer, with_ngrams
from pilotfish.plan.simulation.models import Replay
from pilotfish.plan.simulation.setup import LoadItem, Setup, SimulatedLoad
from pilotfish.plan.simulation.target import VirtualTarget
from pilotfish.workers.records import StepRecord

#: Seconds between two looks of both sides at the clock.
TICK = 0.05


@dataclass
class SimulatedTimes:
    """Of a request, in seconds."""

    came: float
    target: int
    first: float = 0.0  # its first token
    ended: float = 0.0
    tokens: int = 0


@dataclass(frozen=True)
class SimulatedRun:
    requests: list[SimulatedTimes]
    stats: list[RequestStats]  # of each
    steps: list[list[StepRecord]]  # of each target
    pools: list[float]  # seconds that each was busy

    @property
    def seconds(self) -> float:
        return max(request.ended for request in self.requests) - min(request.came for request in self.requests)

    @property
    def tokens_per_second(self) -> float:
        return sum(request.tokens for request in self.requests) / self.seconds

    @property
    def tokens_per_step(self) -> float:
        return sum(r.tokens for r in self.requests) / max(sum(stats.verify_steps for stats in self.stats), 1)


def simulate(setup: Setup, trace: AcceptanceTrace, load: SimulatedLoad, rounds: int = 1) -> SimulatedRun:
    """Plays the load `rounds` times. Figures are of the last round: budgets and drafts learn in those before."""
    simulation = Simulation(setup, trace)
    for _ in range(rounds):
        simulated = simulation.play(load)
    return simulated


class Simulation:
    def __init__(self, setup: Setup, trace: AcceptanceTrace) -> None:
        self.setup, self.trace = setup, trace
        self.events, self.replay = Events(), Replay(trace)
        self.requests: list[Request] = []  # by their ids, which are also their seeds
        self._left, self._concurrency = deque[LoadItem](), 0
        self._times: list[SimulatedTimes] = []  # by the requests' ids
        self._running = 0
        self._drafters: list[PooledDrafter] = []  # async, of each target
        self._pools = [
            VirtualPool(self.events, self.replay, setup, partial(self._to_target, pool_peer(number)))
            for number in range(setup.pools if setup.speculation.mode == "async" else 0)
        ]
        self.targets = [self._make_target(number) for number in range(setup.targets)]
        self._steps = [list[StepRecord]() for _ in self.targets]
        for target, steps in zip(self.targets, self._steps, strict=True):
            target.worker.observe = steps.append
        if self._pools:
            self._tick()
        self.events.run(until=lambda: all(drafter.ready for drafter in self._drafters))

    def play(self, load: SimulatedLoad) -> SimulatedRun:
        first, before = len(self.requests), [pool.busy for pool in self._pools]
        for steps in self._steps:
            steps.clear()
        self._left, self._concurrency = deque(load.items), load.concurrency
        self._begin()
        self.events.run(until=lambda: not self._left and not self._running)
        stats = [request.stats for request in self.requests[first:]]
        busy = [pool.busy - earlier for pool, earlier in zip(self._pools, before, strict=True)]
        return SimulatedRun(self._times[first:], stats, [list(steps) for steps in self._steps], busy)

    def _begin(self) -> None:
        if self._concurrency:
            for number in range(min(self._concurrency, len(self._left))):
                self._submit(number % len(self.targets))
        else:
            for number, item in enumerate(self._left):
                self.events.at(self.events.now + item.at, partial(self._submit, number % len(self.targets)))

    def _submit(self, target: int) -> None:
        item, now = self._left.popleft(), self.events.now
        prompt = self.trace.prompts[item.sequence]
        seed = self.replay.add(item.sequence, len(prompt))
        params = SamplingParams(temperature=self.trace.pair.temperature, max_tokens=item.output)
        request = Request(seed, prompt, params, seed, frozenset(), self.targets[target].context - len(prompt))
        self.requests.append(request)
        self._times.append(SimulatedTimes(now, target))
        self._running += 1
        self.targets[target].submit(request)

    def _committed(self, commit: RequestCommit) -> None:
        times, now = self._times[commit.request.id], self.events.now
        if commit.tokens and not times.tokens:
            times.first = now
        times.tokens += len(commit.tokens)
        if commit.request.finish_reason is not None:
            times.ended = now
            self._running -= 1
            if self._concurrency and self._left:
                self._submit(times.target)

    def _make_target(self, number: int) -> VirtualTarget:
        def make(clock: VirtualClock) -> Drafter:
            if not self._pools:
                return local_drafter(self.replay, self.setup, clock)
            post = partial(self._to_pool, _target_peer(number))
            self._drafters.append(PooledDrafter(self.setup, number, self.trace.pair.vocab_size, clock, post))
            return with_ngrams(self._drafters[-1], self.setup)

        return VirtualTarget(self.events, self.replay, self.setup, make, self._committed)

    def _to_pool(self, sender: Peer, receiver: Peer, message: ToDraft) -> None:
        pool = self._pools[[pool_peer(number) for number in range(len(self._pools))].index(receiver)]
        self._later(partial(pool.deliver, sender, message))

    def _to_target(self, sender: Peer, receiver: Peer, message: ToTarget) -> None:
        drafter = self._drafters[[_target_peer(number) for number in range(len(self.targets))].index(receiver)]
        self._later(lambda: drafter.receive(sender, message, self.events.now))

    def _later(self, deliver: Callable[[], None]) -> None:
        self.events.at(self.events.now + self.setup.host.hop + self.setup.delay, deliver)

    def _tick(self) -> None:
        for drafter in self._drafters:
            drafter.tick(self.events.now)
        for pool in self._pools:
            pool.tick()
        self.events.at(self.events.now + TICK, self._tick)


def _target_peer(number: int) -> Peer:
    return b"target %d" % number
