"""A fleet simulated request by request: servers that route, targets with their queues, steps and caches, draft pools
and prefill workers. One loop over events in virtual time.

    traffic ─► server: costs, routing ─► target: queue, steps, cache ◄─► draft pool, prefill pool
                  ▲ loads, held prefixes      │ first token, events, end
                  └───────────────────────────┘
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count

import numpy as np

from pilotfish.core.routing.held_prefixes import Replica
from pilotfish.core.routing.router import Routing
from pilotfish.plan.fleets.fleet_figures import FleetCounts, FleetFigures, Usage
from pilotfish.plan.fleets.fleet_plan import FleetPlan
from pilotfish.plan.fleets.simulated_pools import Average, SimulatedDrafts, SimulatedPrefills
from pilotfish.plan.fleets.simulated_server import LoadBoard, SimulatedHeld, SimulatedServer, following
from pilotfish.plan.fleets.simulated_target import SimulatedJob, SimulatedTarget, Stretch
from pilotfish.plan.fleets.traffic import SimulatedRequest

#: Seconds between two reports of a target's load, at the least.
REPORT = 0.1
#: Of a sequence's pace over the mean, at the least.
SLOWEST = 0.2


def simulate(plan: FleetPlan, traffic: Iterable[SimulatedRequest], routing: Callable[[], Routing]) -> FleetFigures:
    """What becomes of requests, in order of arrival, with a `routing` for each server."""
    return SimulatedFleet(plan, routing).run(traffic)


class SimulatedFleet:
    """Implements `simulated_target.Watcher`."""

    def __init__(self, plan: FleetPlan, routing: Callable[[], Routing]) -> None:
        self.plan = plan
        self.now = 0.0
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
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._ends: list[float | None] = [None] * plan.targets  # of stretches, as they are in `_events`
        self._reports_at = [0.0] * plan.targets  # when each may report again
        self._reporting = [False] * plan.targets  # whether a report is in `_events`

    def _server(self, routing: Routing, first: int) -> SimulatedServer:
        return SimulatedServer(self.plan.server, following(routing, self.held), self._board, self._sending, first)

    def _target(self, replica: Replica) -> SimulatedTarget:
        drafts = self.drafts[self._places[replica] % len(self.drafts)] if self.drafts else None
        return SimulatedTarget(self.plan.target, self, partial(self.held.change, replica), drafts, self.prefills)

    def run(self, traffic: Iterable[SimulatedRequest]) -> FleetFigures:
        turns, began = count(), False
        for request in traffic:
            if not began and request.at >= self.plan.warm_up:
                self._go_on_until(self.plan.warm_up)
                self.counts.begin(self.usage())
                began = True
            self._go_on_until(request.at)
            self._arrive(request, next(turns) % len(self.servers))
        self.counts.end(self.usage())
        self._go_on_until(math.inf)
        return self.counts.figures(self.plan)

    def _go_on_until(self, time: float) -> None:
        while self._events and self._events[0][0] <= time:
            self.now, _, event = heapq.heappop(self._events)
            event(self.now)
        self.now = max(self.now, time) if time < math.inf else self.now

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def usage(self) -> Usage:
        """So far."""
        return Usage(
            seconds=self.now,
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
            self._at(server.take(request, self.now), partial(self._route, request, place))
        else:
            self.counts.refused += 1

    def _route(self, request: SimulatedRequest, place: int, now: float) -> None:
        route = self.servers[place].choose(request)
        target = self._places[route.replica]
        self.targets[target].submit(SimulatedJob(request, self._pace(), place, route), now)
        self._follow(target, now)

    def _pace(self) -> float:
        spread = self.plan.acceptance.spread if self.drafts else 0.0
        return max(float(self._draw.gamma(spread**-2, spread**2)), SLOWEST) if spread else 1.0

    # -- targets

    def _follow(self, place: int, now: float) -> None:
        """A target may have another stretch, and has another load."""
        ends = self.targets[place].ends_at
        if ends is not None and ends != self._ends[place]:
            self._at(ends, partial(self._end_stretch, place))
        self._ends[place] = ends
        if now >= self._reports_at[place]:
            self._report(place, now)
        elif not self._reporting[place]:
            self._reporting[place] = True
            self._at(self._reports_at[place], partial(self._report, place))

    def _report(self, place: int, now: float) -> None:
        self._reports_at[place], self._reporting[place] = now + REPORT, False
        self._board.report(place, self.targets[place].load)

    def _end_stretch(self, place: int, now: float) -> None:
        if self._ends[place] == now:  # else it has ended earlier
            self.targets[place].end_stretch(now)
            self._follow(place, now)

    def _come(self, job: SimulatedJob, now: float) -> None:
        place = self._places[job.route.replica]
        self.targets[place].come(job, now)
        self._follow(place, now)

    # -- what targets tell

    def stepped(self, stretch: Stretch) -> None:
        if stretch.decoding:
            servers, plan = self.plan.servers, self.plan.server
            told = servers * (1 - (1 - 1 / servers) ** stretch.decoding)  # those that have one of the requests
            seconds = stretch.steps * (stretch.decoding * plan.event_seconds + told * plan.frame_seconds)
            self._sending.add(seconds / servers, self.now)
            self.counts.stepped(stretch, told)

    def began(self, job: SimulatedJob, now: float) -> None:
        self.counts.began(job, now)

    def ended(self, job: SimulatedJob, now: float) -> None:
        server = self.servers[job.server]
        server.requests -= 1
        server.routing.ended(job.route)
        self.counts.ended(job, now)

    def away(self, job: SimulatedJob, until: float) -> None:
        self._at(until, partial(self._come, job))
