from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pilotfish.config.hardware.cost import ForwardLoad
from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.drafting.drafter import Drafter, NoDrafter
from pilotfish.core.peers.fields import Peer
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.budget import AdaptiveBudget, Budget, FixedBudget
from pilotfish.core.scheduling.calibration import StepCosts
from pilotfish.core.scheduling.executor import Outcome
from pilotfish.core.scheduling.request import Request, RequestStats
from pilotfish.core.scheduling.scheduler import Scheduler
from pilotfish.core.scheduling.step import RequestCommit
from pilotfish.plan.events import Events, VirtualClock
from pilotfish.plan.simulation.acceptance import AcceptanceTrace
from pilotfish.plan.simulation.drafts import VirtualPool, local_drafter, peer_of, pooled_drafter, with_ngrams
from pilotfish.plan.simulation.models import Replay, ReplayedModel
from pilotfish.plan.simulation.setup import MAX_ROWS, LoadItem, Setup, SimulatedLoad, Speculation
from pilotfish.wire.channel import Received
from pilotfish.wire.pool_users import RemoteDrafter
from pilotfish.workers.records import StepRecord
from pilotfish.workers.target import BegunStep, TargetWorker

#: Rows whose cost a budget knows at the start.
KNOTS = tuple(1 << power for power in range(11))


class VirtualTarget:
    """Production's step loop, scheduler and budget over a replayed model."""

    def __init__(
        self,
        events: Events,
        replay: Replay,
        setup: Setup,
        make_drafter: Callable[[VirtualClock], Drafter],
        committed: Callable[[RequestCommit], None],
    ) -> None:
        self.clock = VirtualClock()
        self._events = events
        self._committed = committed
        executor = ReplayedModel(replay, setup.host.of_target(setup.target), self.clock)
        self.context = executor.context
        scheduler = Scheduler(SlotPool(executor.num_slots), MAX_ROWS, setup.max_requests)
        drafter = make_drafter(self.clock)
        self.worker = TargetWorker(executor, scheduler, drafter, budget_of(setup, drafter), self.clock)
        self._idle = True

    def submit(self, request: Request) -> None:
        self.worker.scheduler.add(request)
        if self._idle:
            self._idle = False
            self._events.at(self._events.now, self._begin)

    def _begin(self) -> None:
        self.clock.now = self._events.now
        begun = self.worker.begin()
        if begun is None:
            self._idle = True
            return
        outcome = self.worker.execute(begun.step)  # which moves the clock to its end
        self._events.at(self.clock.now, partial(self._end, begun, outcome))

    def _end(self, begun: BegunStep, outcome: Outcome) -> None:
        for commit in self.worker.end(begun, outcome):
            self._committed(commit)
        self._begin()


def budget_of(setup: Setup, drafter: Drafter) -> Budget:
    """An adaptive budget starts with the forwards' cost; service teaches it the rest."""
    spec = setup.speculation
    if isinstance(drafter, NoDrafter):
        return FixedBudget(spec.nodes, spec.levels)
    exposed = setup.draft(ForwardLoad(rows=spec.width)) if spec.mode == "sync" and setup.draft else 0.0
    return budget_over(costs_of(setup), spec, exposed)


def budget_over(costs: StepCosts, spec: Speculation, level_seconds: float = 0.0) -> Budget:
    if not spec.adaptive:
        return FixedBudget(spec.nodes, spec.levels)
    return AdaptiveBudget(spec.nodes, spec.levels, costs, level_seconds)


def costs_of(setup: Setup) -> StepCosts:
    return StepCosts({rows: setup.target(ForwardLoad(rows=rows)) for rows in KNOTS if rows <= MAX_ROWS})


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
        self._drafters: list[RemoteDrafter] = []  # async, of each target
        self._pools = [
            VirtualPool(self.events, self.replay, setup, partial(self._to_target, peer_of(number)))
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
            post = partial(self._to_pool, peer_of(number))
            now, vocab_size = lambda: self.events.now, self.trace.pair.vocab_size
            self._drafters.append(pooled_drafter(self.setup, number, vocab_size, now, post))
            return with_ngrams(self._drafters[-1], self.setup)

        return VirtualTarget(self.events, self.replay, self.setup, make, self._committed)

    def _to_pool(self, sender: Peer, receiver: Peer, *frames: bytes) -> None:
        for frame in frames:
            self._later(partial(self._pools[int(receiver)].deliver, sender, frame))

    def _to_target(self, sender: Peer, receiver: Peer, *frames: bytes) -> None:
        for frame in frames:
            self._later(partial(self._drafters[int(receiver)].receive, Received(sender, frame)))

    def _later(self, deliver: Callable[[], None]) -> None:
        self.events.at(self.events.now + self.setup.host.hop + self.setup.delay, deliver)

    def _tick(self) -> None:
        for drafter in self._drafters:
            drafter.tick()
        for pool in self._pools:
            pool.tick()
        self.events.at(self.events.now + TICK, self._tick)
