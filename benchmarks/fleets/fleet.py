"""A fleet simulated request by request: servers that route, targets with their queues, steps and caches, draft pools
and prefill workers. One loop over events in virtual time.

    traffic ─► server: costs, routing ─► target: queue, steps, cache ◄─► draft pool, prefill pool
                  ▲ loads, held prefixes      │ first token, events, end
                  └───────────────────────────┘
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import count

import numpy as np

from fleets.fleet_figures import FleetCounts, FleetFigures, Usage
from fleets.fleet_plan import FleetPlan
from fleets.simulated_pools import Average, SimulatedDrafts, SimulatedPrefills
from fleets.simulated_server import LoadBoard, SimulatedHeld, SimulatedServer
from fleets.simulated_target import SimulatedJob, SimulatedTarget, Stretch
from fleets.traffic import SimulatedRequest
from pilotfish.core.routing.held_prefixes import Replica
from pilotfish.core.routing.router import Router
from pilotfish.plan.events import Events

#: Seconds between two reports of a target's load, at the least.
REPORT = 0.1
#: Of a sequence's pace over the mean, at the least.
SLOWEST = 0.2


def simulate(plan: FleetPlan, traffic: Iterable[SimulatedRequest], routing: Callable[[], Router]) -> FleetFigures:
    """`traffic` in order of arrival; a `routing` for each server."""
    return SimulatedFleet(plan, routing).run(traffic)


class SimulatedFleet:
    """Implements `simulated_target.Watcher`."""

    def __init__(self, plan: FleetPlan, routing: Callable[[], Router]) -> None:
        self.plan = plan
        self._events = Events()
        self.counts = FleetCounts()
        self.held = SimulatedHeld()
        replicas: list[Replica] = [f"target-{i}" for i in range(plan.targets)]
        self._board = LoadBoard(replicas)
        self._places = {replica: i for i, replica in enumerate(replicas)}
        self._sending = Average()
        self.servers = [self._server(routing(), i * plan.targets // plan.servers) for i in range(plan.servers)]
        self.drafts = [SimulatedDrafts(plan.draft, plan.acceptance) for _ in range(plan.draft_pools) if plan.draft]
        self.prefills = SimulatedPrefills(plan.prefill, plan.prefill_workers) if plan.prefill else None
        self.targets = [self._target(replica) for replica in replicas]
        self._draw = np.random.default_rng(plan.seed)
        self._ends: list[float | None] = [None] * plan.targets  # of stretches, as they are in `_events`
        self._reports_at = [0.0] * plan.targets  # when each may report again
        self._reporting = [False] * plan.targets  # whether a report is in `_events`

    def _server(self, routing: Router, first: int) -> SimulatedServer:
        routing.held = self.held
        return SimulatedServer(self.plan.server, routing, self._board, self._sending, first)

    def _target(self, replica: Replica) -> SimulatedTarget:
        drafts = self.drafts[self._places[replica] % len(self.drafts)] if self.drafts else None
        return SimulatedTarget(self.plan.target, self, partial(self.held.change, replica), drafts, self.prefills)

    def run(self, traffic: Iterable[SimulatedRequest]) -> FleetFigures:
        turns, began = count(), False
        for request in traffic:
            if not began and request.at >= self.plan.warm_up:
                self._events.run_to(self.plan.warm_up)
                self.counts.begin(self.usage())
                began = True
            self._events.run_to(request.at)
            self._arrive(request, next(turns) % len(self.servers))
        self.counts.end(self.usage())
        self._events.run(until=lambda: False)
        return self.counts.figures(self.plan)

    def usage(self) -> Usage:
        return Usage(
            seconds=self._events.now,
            targets=[target.busy_seconds for target in self.targets],
            requests=sum(server.busy_seconds for server in self.servers),
            reading=sum(pool.read_seconds for pool in self.drafts),
            prefills=self.prefills.busy_seconds if self.prefills else 0.0,
            keys_told=self.held.told,
            reports=int(self._board.numbers.sum()),
        )

    # -- requests

    def _arrive(self, request: SimulatedRequest, place: int) -> None:
        server = self.servers[place]
        fits = request.tokens + request.output <= self.plan.target.slots
        if server.requests < self.plan.server.most and fits:
            self._events.at(server.take(request, self._events.now), partial(self._route, request, place))
        else:
            self.counts.refused += 1

    def _route(self, request: SimulatedRequest, place: int) -> None:
        route = self.servers[place].choose(request)
        target = self._places[route.replica]
        self.targets[target].submit(SimulatedJob(request, self._pace(), place, route), self._events.now)
        self._follow(target)

    def _pace(self) -> float:
        spread = self.plan.acceptance.spread if self.drafts else 0.0
        return max(float(self._draw.gamma(spread**-2, spread**2)), SLOWEST) if spread else 1.0

    # -- targets

    def _follow(self, place: int) -> None:
        """A target may have another stretch, and has another load."""
        ends = self.targets[place].ends_at
        if ends is not None and ends != self._ends[place]:
            self._events.at(ends, partial(self._end_stretch, place))
        self._ends[place] = ends
        if self._events.now >= self._reports_at[place]:
            self._report(place)
        elif not self._reporting[place]:
            self._reporting[place] = True
            self._events.at(self._reports_at[place], partial(self._report, place))

    def _report(self, place: int) -> None:
        self._reports_at[place], self._reporting[place] = self._events.now + REPORT, False
        self._board.report(place, self.targets[place].load)

    def _end_stretch(self, place: int) -> None:
        if self._ends[place] == self._events.now:  # else it has ended earlier
            self.targets[place].end_stretch(self._events.now)
            self._follow(place)

    def _come(self, job: SimulatedJob) -> None:
        place = self._places[job.route.replica]
        self.targets[place].come(job, self._events.now)
        self._follow(place)

    # -- what targets tell

    def stepped(self, stretch: Stretch) -> None:
        if stretch.decoding:
            servers, plan = self.plan.servers, self.plan.server
            told = servers * (1 - (1 - 1 / servers) ** stretch.decoding)  # those that have one of the requests
            seconds = stretch.steps * (stretch.decoding * plan.event_seconds + told * plan.frame_seconds)
            self._sending.add(seconds / servers, self._events.now)
            self.counts.stepped(stretch, told)

    def began(self, job: SimulatedJob, now: float) -> None:
        self.counts.began(job, now)

    def ended(self, job: SimulatedJob, now: float) -> None:
        server = self.servers[job.server]
        server.requests -= 1
        server.routing.ended(job.route)
        self.counts.ended(job, now)

    def away(self, job: SimulatedJob, until: float) -> None:
        self._events.at(until, partial(self._come, job))
