"""A target of a simulated fleet. Its steps are those of `scheduler.py`: a row for each request, the rest for
prompts in order of arrival, guesses in what is left. Equal steps one after the other are one *stretch*, so that an hour
of them is computed in moments. Other than there, a request is admitted once its longest sequence fits, and none is
preempted.

    stretch   a chunk of the first prompt in each of n steps │ a step in which prompts end │ n steps that only decode
    ends      when its steps are done, or after the step at hand where a request has arrived that can be admitted
"""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Protocol

from fleets.run_cache import Changed, KnownRun, RunCache
from fleets.simulated_pools import NO_GUESSES, Guessing, SimulatedDrafts, SimulatedPrefills
from fleets.traffic import SimulatedRequest
from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS
from pilotfish.core.routing.router import ReplicaLoad, Route
from pilotfish.core.scheduling.request import CANDIDATES, MAX_PASSED_OVER

#: Of a token, by which progress may be off.
EPSILON = 1e-6


@dataclass(frozen=True)
class TargetPlan:
    """Seconds of a forward are those of its rows, and of the tokens that its sequences see."""

    seconds: Sequence[float]  # [max_rows + 1]
    context_seconds: float  # for each token of all contexts
    host_seconds: float  # between two forwards
    slots: int
    max_requests: int
    guessing: Sequence[Guessing]  # [max_requests + 1], by the number of sequences that decode

    @property
    def max_rows(self) -> int:
        return len(self.seconds) - 1


@dataclass(slots=True, eq=False)
class SimulatedJob:
    request: SimulatedRequest
    pace: float  # tokens that it commits a step, over those of the mean
    server: int
    route: Route
    found: int = 0  # tokens of its prompt whose KV was there
    pending: int = 0  # tokens of its prompt without KV
    path: list[KnownRun] = field(default_factory=list)
    first_at: float = 0.0
    passed_over: int = 0


@dataclass(slots=True)
class Stretch:
    begin: float
    steps: int
    seconds: float  # of a step
    decoding: int  # sequences that commit in each step
    guessing: Guessing
    chunk: int = 0  # rows of the first prompt in each step
    ending: int = 0  # prompts that end with its only step, the first of all


class Watcher(Protocol):
    """Drives a target, and hears of its steps and requests."""

    def stepped(self, stretch: Stretch) -> None: ...

    def began(self, job: SimulatedJob, now: float) -> None:
        """It has its first token."""

    def ended(self, job: SimulatedJob, now: float) -> None: ...

    def away(self, job: SimulatedJob, until: float) -> None:
        """`SimulatedTarget.come` is to be called then."""


class SimulatedTarget:
    """Its driver calls `end_stretch` at `ends_at`, which any call may change."""

    def __init__(
        self,
        plan: TargetPlan,
        watcher: Watcher,
        changed: Changed,
        drafts: SimulatedDrafts | None = None,
        prefills: SimulatedPrefills | None = None,
    ) -> None:
        self.plan = plan
        self.cache = RunCache(plan.slots, changed)
        self.busy_seconds = 0.0
        self.waiting: deque[SimulatedJob] = deque()
        self.prefilling: deque[SimulatedJob] = deque()
        self.decoding: list[tuple[float, int, SimulatedJob]] = []  # by the progress at which they end
        self.away = 0  # requests whose KV is computed elsewhere
        self.ends_at: float | None = None  # the stretch
        self._watcher, self._drafts, self._prefills = watcher, drafts, prefills
        self._stretch: Stretch | None = None
        self._progress = 0.0  # tokens that a sequence of mean pace has committed since the beginning
        self._context = 0.0  # tokens that the sequences see
        self._pending = 0  # tokens of running requests without KV
        self._waiting_tokens = 0
        self._next: SimulatedJob | None = None
        self._order = count()

    @property
    def running(self) -> int:
        return len(self.prefilling) + len(self.decoding) + self.away

    @property
    def load(self) -> ReplicaLoad:
        room = self.plan.max_requests - self.running
        return ReplicaLoad(self._pending + self._waiting_tokens, self.cache.live, len(self.waiting), room)

    def submit(self, job: SimulatedJob, now: float) -> None:
        self.waiting.append(job)
        self._waiting_tokens += job.request.tokens
        if self.running < self.plan.max_requests:
            self._look_up(now)

    def come(self, job: SimulatedJob, now: float) -> None:
        """Its KV has come from elsewhere, but for the last token's."""
        self.away -= 1
        self._pending -= job.pending - 1
        self._context += job.pending - 1
        job.pending = 1
        self.prefilling.append(job)
        self._look_up(now)

    def _look_up(self, now: float) -> None:
        """Have what is new begin as soon as may be: with the step after the one at hand."""
        stretch = self._stretch
        if stretch is None:
            self._begin(now)
            return
        done = int((now - stretch.begin) / stretch.seconds) + 1
        if done < stretch.steps:
            stretch.steps = done
            self.ends_at = stretch.begin + done * stretch.seconds

    def end_stretch(self, now: float) -> None:
        stretch = self._stretch
        assert stretch is not None
        self.busy_seconds += stretch.steps * stretch.seconds
        self._progress += stretch.steps * stretch.guessing.tokens
        self._context += stretch.decoding * stretch.steps * stretch.guessing.tokens
        if stretch.chunk:
            self._compute(self.prefilling[0], stretch.steps * stretch.chunk)
        self._watcher.stepped(stretch)
        self._finish(now)
        for _ in range(stretch.ending):
            job = self.prefilling.popleft()
            self._compute(job, job.pending)
            self._decode(job, now)
        self._begin(now)

    def _compute(self, job: SimulatedJob, rows: int) -> None:
        job.pending -= rows
        self._pending -= rows
        self._context += rows

    def _finish(self, now: float) -> None:
        while self.decoding and self.decoding[0][0] <= self._progress + EPSILON:
            ends, _, job = heapq.heappop(self.decoding)
            committed = self._progress - ends + (job.request.output - 1) / job.pace
            self._context -= job.request.tokens + committed
            if self._drafts:
                self._drafts.changed(-1, -job.request.tokens - job.request.output)
            self._leave(job, now)

    def _leave(self, job: SimulatedJob, now: float) -> None:
        self.cache.ended(job.request, job.path)
        self._watcher.ended(job, now)

    def _decode(self, job: SimulatedJob, now: float) -> None:
        request, job.first_at = job.request, now
        self.cache.computed(request, job.found, job.path)
        self._watcher.began(job, now)
        if request.output == 1:
            self._context -= request.tokens
            self._leave(job, now)
            return
        heapq.heappush(self.decoding, (self._progress + (request.output - 1) / job.pace, next(self._order), job))
        if self._drafts:
            self._drafts.read(request.tokens - job.found, now)
            self._drafts.changed(1, request.tokens + request.output)

    def _admit(self, now: float) -> None:
        while self.waiting and self.running < self.plan.max_requests:
            job = self._next = self._next or self._choose()
            if not self.cache.room(job.request):
                return
            self._take(job)
            job.found, job.path = self.cache.admit(job.request)
            job.pending = job.request.tokens - job.found
            here = (self._pending + job.pending) / self.plan.max_rows * self.plan.seconds[-1]
            self._context += job.found
            self._pending += job.pending
            if (
                self._prefills
                and (comes := self._prefills.takes(job.pending, here, len(self.decoding), now)) is not None
            ):
                self.away += 1
                self._watcher.away(job, comes)
            else:
                self.prefilling.append(job)

    def _choose(self) -> SimulatedJob:
        """As `core/scheduling/request.py` does."""
        oldest = self.waiting[0]
        if len(self.waiting) == 1 or oldest.passed_over == MAX_PASSED_OVER:
            return oldest
        known = [(self.cache.known(job.request), job) for job in islice(self.waiting, CANDIDATES)]
        most, best = max(known, key=lambda one: one[0])
        return best if most >= known[0][0] + OBJECT_TOKENS else oldest

    def _take(self, job: SimulatedJob) -> None:
        for other in self.waiting:
            if other is job:
                break
            other.passed_over += 1
        self.waiting.remove(job)
        self._waiting_tokens -= job.request.tokens
        self._next = None

    def _begin(self, now: float) -> None:
        self._admit(now)
        self._stretch, self.ends_at = None, None
        if self.prefilling or self.decoding:
            stretch = self._stretch = self._with_prompts(now) if self.prefilling else self._only_decoding(now)
            self.ends_at = now + stretch.steps * stretch.seconds

    def _seconds(self, rows: float) -> float:
        plan = self.plan
        return plan.seconds[int(rows)] + self._context * plan.context_seconds + plan.host_seconds

    def _with_prompts(self, now: float) -> Stretch:
        plan, decoding = self.plan, len(self.decoding)
        room = plan.max_rows - decoding
        first = self.prefilling[0].pending
        if first > room:
            return Stretch(now, (first - 1) // room, self._seconds(plan.max_rows), decoding, NO_GUESSES, chunk=room)
        ending = 0
        for job in self.prefilling:
            if job.pending > room:
                self._compute(job, room)
                room = 0
                break
            room -= job.pending
            ending += 1
        guessing = self._guessing(decoding, room)
        seconds = self._seconds(plan.max_rows - room + decoding * guessing.nodes)
        return Stretch(now, 1, seconds, decoding, guessing, ending=ending)

    def _only_decoding(self, now: float) -> Stretch:
        decoding = len(self.decoding)
        guessing = self._guessing(decoding, self.plan.max_rows - decoding)
        steps = math.ceil((self.decoding[0][0] - self._progress) / guessing.tokens - EPSILON)
        return Stretch(now, max(steps, 1), self._seconds(decoding * (1 + guessing.nodes)), decoding, guessing)

    def _guessing(self, decoding: int, rows: int) -> Guessing:
        wanted = self.plan.guessing[decoding]
        if self._drafts is None or not decoding or not wanted.nodes or decoding * wanted.nodes > rows:
            return NO_GUESSES
        return self._drafts.guess(wanted, self._seconds(decoding * (1 + wanted.nodes)))
