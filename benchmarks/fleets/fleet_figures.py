"""Figures of a simulated fleet."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fleets.fleet_plan import FleetPlan
from fleets.simulated_target import SimulatedJob, Stretch

#: Gaps between events are counted in bins, so many to a decade, from a microsecond on.
BINS, DECADES, FIRST_GAP = 100, 10, 1e-6


@dataclass(frozen=True)
class Usage:
    """Seconds that parts of a fleet have worked, of all there were."""

    seconds: float
    targets: Sequence[float]
    requests: float  # servers, on requests
    reading: float  # draft pools, on prompts
    prefills: float
    keys_told: int
    reports: int


@dataclass(frozen=True)
class Quantiles:
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        return cls(*np.quantile(np.asarray(values or (math.nan,)), (0.5, 0.95, 0.99)).tolist())


@dataclass(frozen=True)
class FleetFigures:
    """Of requests that arrived after the warm-up; what a second holds is until the last arrival. Busy is a share of
    what a part can do; above 1 it would fall behind."""

    requests: int  # that have ended
    refused: int
    seconds: float
    first_token: Quantiles  # seconds from a request's arrival
    gaps: Quantiles  # seconds between two events of a stream
    token: Quantiles  # seconds for a token after the first, by request
    tokens: float  # a second
    hit_rate: float  # of all prompts' tokens, those whose KV was there
    predicted: float  # likewise, as routing believed
    busy_targets: float
    busiest_target: float
    busy_servers: float
    busy_drafts: float
    busy_prefills: float
    routed: float  # requests a second
    prompts: float  # their tokens
    events: float  # of all streams, a second
    frames: float  # steps of targets that servers hear of, a second
    keys_told: float  # routing keys of prefixes that targets got or lost, a second
    reports: float  # that targets send to each server, a second
    decoding: float  # sequences at a time, in the mean: the sessions of drafts
    context: float  # tokens of those


class GapCounts:
    """Times between events: too many to keep each."""

    def __init__(self) -> None:
        self._counts = [0] * (BINS * DECADES)

    def add(self, seconds: float, count: int) -> None:
        place = int(BINS * math.log10(max(seconds / FIRST_GAP, 1.0)))
        self._counts[min(place, len(self._counts) - 1)] += count

    def quantiles(self) -> Quantiles:
        total = np.cumsum(self._counts)
        places = np.searchsorted(total, total[-1] * np.array((0.5, 0.95, 0.99)))
        return Quantiles(*(FIRST_GAP * 10 ** ((places + 0.5) / BINS)).tolist())


class FleetCounts:
    """Counted while a fleet is simulated: requests that arrive from `begin` on, and what happens from then to `end`."""

    def __init__(self) -> None:
        self.refused = 0
        self.gaps = GapCounts()
        self._open = False
        self._begin = self._end = Usage(math.inf, (), 0.0, 0.0, 0.0, 0, 0)
        self._first, self._token = array("d"), array("d")
        self._requests = self._prompts = self._found = self._predicted = 0
        self._events = self._frames = self._tokens = self._nodes = self._decoding = self._context = 0.0

    def begin(self, usage: Usage) -> None:
        self._begin, self._open, self.refused = usage, True, 0

    def end(self, usage: Usage) -> None:
        self._end, self._open = usage, False

    def stepped(self, stretch: Stretch, servers: float) -> None:
        """So many servers are told of each step, in the mean."""
        if self._open:
            events = stretch.steps * stretch.decoding
            self._frames += stretch.steps * servers
            self.gaps.add(stretch.seconds, events)
            self._events += events
            self._tokens += events * stretch.guessing.tokens
            self._nodes += events * stretch.guessing.nodes
            self._decoding += events * stretch.seconds

    def began(self, job: SimulatedJob, now: float) -> None:
        if job.request.at >= self._begin.seconds:
            self._first.append(now - job.request.at)
            self._prompts += job.request.tokens
            self._found += job.found
            self._predicted += job.route.cached
            self._events += 1
            self._tokens += 1

    def ended(self, job: SimulatedJob, now: float) -> None:
        if job.request.at >= self._begin.seconds:
            self._requests += 1
            if job.request.output > 1:
                self._token.append((now - job.first_at) / (job.request.output - 1))
            self._context += (job.request.tokens + job.request.output / 2) * (now - job.first_at)

    def figures(self, plan: FleetPlan) -> FleetFigures:
        begin, end = self._begin, self._end
        seconds = max(end.seconds - begin.seconds, 1e-9)
        busy = (np.array(end.targets) - np.array(begin.targets)) / seconds
        sent = self._events * plan.server.event_seconds + self._frames * plan.server.frame_seconds
        served = end.requests - begin.requests + sent
        levels = self._nodes / plan.draft.leaves if plan.draft else 0.0
        return FleetFigures(
            requests=self._requests,
            refused=self.refused,
            seconds=seconds,
            first_token=Quantiles.of(self._first),
            gaps=self.gaps.quantiles(),
            token=Quantiles.of(self._token),
            tokens=self._tokens / seconds,
            hit_rate=self._found / max(self._prompts, 1),
            predicted=self._predicted / max(self._prompts, 1),
            busy_targets=float(busy.mean()),
            busiest_target=float(busy.max()),
            busy_servers=served / seconds / plan.servers,
            busy_drafts=(end.reading - begin.reading + levels) / seconds / max(plan.draft_pools, 1),
            busy_prefills=(end.prefills - begin.prefills) / seconds / max(plan.prefill_workers, 1),
            routed=len(self._first) / seconds,
            prompts=self._prompts / seconds,
            events=self._events / seconds,
            frames=self._frames / seconds,
            keys_told=(end.keys_told - begin.keys_told) / seconds,
            reports=(end.reports - begin.reports) / seconds,
            decoding=self._decoding / seconds,
            context=self._context / seconds,
        )
