"""Production's step loop, scheduler and budget over a replayed model."""

from collections.abc import Callable
from functools import partial

from pilotfish.config.hardware.cost import ForwardLoad
from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.drafting.drafter import Drafter, NoDrafter
from pilotfish.core.scheduling.budget import AdaptiveBudget, Budget, FixedBudget
from pilotfish.core.scheduling.calibration import StepCosts
from pilotfish.core.scheduling.executor import Outcome
from pilotfish.core.scheduling.request import Request
from pilotfish.core.scheduling.scheduler import Scheduler
from pilotfish.core.scheduling.step import RequestCommit
from pilotfish.plan.events import Events, VirtualClock
from pilotfish.plan.simulation.models import Replay, ReplayedModel
from pilotfish.plan.simulation.setup import MAX_ROWS, Setup, Speculation
from pilotfish.workers.target import BegunStep, TargetWorker

#: Rows whose cost a budget knows at the start.
KNOTS = tuple(1 << power for power in range(11))


class VirtualTarget:
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
