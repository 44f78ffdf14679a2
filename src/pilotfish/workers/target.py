"""The target's loop: plan, propose, schedule, forward, sample, commit; and a guard around its drafter."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from pilotfish.core.drafting.drafter import Drafter, DraftLimits, NoDrafter
from pilotfish.core.sampling.constraint import MaskMaker, constrained, masks_when_asked
from pilotfish.core.scheduling.budget import Budget, StepLoad, StepTime
from pilotfish.core.scheduling.executor import Executor, Outcome, Sampling
from pilotfish.core.scheduling.request import Request
from pilotfish.core.scheduling.scheduler import Scheduler
from pilotfish.core.scheduling.step import Chunk, RequestCommit, Step
from pilotfish.core.trees.tree import ROOT, Forest, Guesses
from pilotfish.workers.records import StepRecord

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BegunStep:
    step: Step
    load: StepLoad
    limits: DraftLimits
    offered: int  # nodes in the trees before the budget's choice
    late: frozenset[int]  # requests whose drafter was asked for a tree and had none
    began: float
    planned: float
    drafted: float
    scheduled: float


@dataclass(frozen=True)
class CommittedStep:
    begun: BegunStep
    commits: list[RequestCommit]
    hits: int
    before: float  # this and the other moments are those of the StepRecord
    prepared: float
    computed: float
    verified: float
    ended: float


class TargetWorker:
    """Runs requests to their end over one executor. All state of requests changes in the scheduler."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        drafter: Drafter,
        budget: Budget,
        clock: Callable[[], float] = time.perf_counter,
        masks: MaskMaker = masks_when_asked,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.drafter = GuardedDrafter(drafter, executor.vocab_size)
        self.budget = budget
        self.observe: Callable[[StepRecord], None] = lambda _: None
        self.take_in: Callable[[], None] = lambda: None  # adds and aborts requests, right before a step is planned
        self.last_step: StepRecord | None = None  # None: there was nothing to run
        self._speculates = True  # by the last step that sampled
        self._masks = masks
        self._clock = clock
        self._ended = clock()

    def step(self) -> list[RequestCommit]:
        """One forward over every running request; its commits. No step while all wait for KV from elsewhere. If a
        forward or commit fails, its requests end, all they held is freed, and it raises."""
        begun = self.begin()
        return self._idle() if begun is None else self.end(begun, self.execute(begun.step))

    def _idle(self) -> list[RequestCommit]:
        self.scheduler.wait()
        self.last_step = None
        return []

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def check(self) -> None:
        """Between two steps: EngineError if a KV slot is neither free nor owned."""
        self.scheduler.check()

    def begin(self) -> BegunStep | None:
        self.take_in()
        began = self._clock()
        chunks = self._plan()
        if not chunks:
            return None
        rows = sum(chunk.count for chunk in chunks)
        sampling = [chunk.request for chunk in chunks if chunk.complete]
        context = sum(len(request.tokens) for request in sampling)
        load = StepLoad(len(sampling), rows, self.scheduler.room(chunks), context)
        planned = self._clock()
        limits = self._limits(load, planned)
        offered = self.drafter.propose(sampling, limits)
        drafted = self._clock()
        late = self.drafter.late(sampling, offered, limits)
        nodes = self.budget.nodes(load, offered, drafted - planned, self.drafter.levels)
        step = self.scheduler.schedule(chunks, offered, nodes)
        return BegunStep(step, load, limits, len(offered), late, began, planned, drafted, self._clock())

    def end(self, begun: BegunStep, outcome: Outcome) -> list[RequestCommit]:
        return self.conclude(self.commit(begun, outcome))

    def commit(self, begun: BegunStep, outcome: Outcome) -> CommittedStep:
        """All that the next step hangs on; the drafter is told."""
        step, verified = begun.step, self._clock()
        computed = sum(chunk.count - 1 for chunk in step.chunks if chunk.count)
        self.scheduler.loads.computed(computed, verified - begun.scheduled)
        commits = self._commits_of(begun, outcome)
        self.drafter.verified(step.requests, step.forest)
        hits = sum([self._tell_drafter(commit) for commit in commits])
        self._tell()
        before, self._ended = self._ended, self._clock()
        computed_at = max(verified - outcome.seconds.sample, begun.scheduled)
        prepared_at = max(computed_at - outcome.seconds.model, begun.scheduled)
        return CommittedStep(begun, commits, hits, before, prepared_at, computed_at, verified, self._ended)

    def conclude(self, done: CommittedStep) -> list[RequestCommit]:
        begun, commits, drafting = done.begun, done.commits, done.begun.drafted - done.begun.planned
        begun_at = begun.began, begun.planned, begun.drafted, begun.scheduled
        moments = (done.before, *begun_at, done.prepared, done.computed, done.verified, done.ended)
        self.last_step = StepRecord(*moments, **_counts(begun.step, commits), offered=begun.offered, hits=done.hits)
        self.observe(self.last_step)
        spent = StepTime(begun.load, begun.limits, drafting, done.ended - begun.began - drafting)
        self.budget.observe(begun.step, commits, spent)
        return commits

    def _tell(self) -> None:
        self.drafter.gather()
        self.drafter.flush()

    def _plan(self) -> list[Chunk]:
        plan = self.scheduler.plan()
        for request in plan.admitted:
            request.admitted = self._clock() if request.admitted is None else request.admitted
        for request in plan.preempted:
            self.drafter.pause(request)
        if self._speculates and plan.admitted:
            self.drafter.expect(plan.admitted)
        return plan.chunks

    def _limits(self, load: StepLoad, now: float) -> DraftLimits:
        limits = self.budget.limits(load, now)
        if load.sequences:
            self._speculates = limits.nodes > 0
        return limits

    def execute(self, step: Step) -> Outcome:
        try:
            self.drafter.flush()
            return self.executor.execute(step.rows(), self._sampling(step))
        except BaseException:  # an interrupt too
            self.fail(step)
            raise

    def fail(self, step: Step) -> None:
        self.scheduler.cancel(step)
        self._abort_all(step)

    def _sampling(self, step: Step) -> Sampling:
        """Masks are computed while the forward runs."""
        sampling, masks = step.sampling(), step.masks(self._masks, self.executor.vocab_size)
        return sampling if masks is None else replace(sampling, masks=masks)

    def _commits_of(self, begun: BegunStep, outcome: Outcome) -> list[RequestCommit]:
        step = begun.step
        try:
            scoring, broken = step.scoring_rows(), set(outcome.broken)
            unscored = {request for request, rows in scoring.items() if not broken.isdisjoint(rows)}
            commits = self.scheduler.commit(step, outcome.tokens, unscored)
            sharing = begun.load.sequences if begun.load.room and begun.limits.nodes else 0
            marked = [replace(one, late=one.request.id in begun.late, sharing=sharing) for one in commits]
            return with_logprobs(marked, step, scoring, outcome)
        except BaseException:
            self._abort_all(step)
            raise

    def _abort_all(self, step: Step) -> None:
        for chunk in step.chunks:
            self.scheduler.abort(chunk.request)
            self.drafter.close(chunk.request)

    def abort(self, request: Request) -> None:
        """End a request between two steps; all it held is free when this returns, or when the forward that runs ahead
        ends."""
        if request.finish_reason is None:
            self.scheduler.abort(request)
            self.drafter.close(request)

    def _tell_drafter(self, commit: RequestCommit) -> bool:
        """Whether the commit was a hit."""
        request = commit.request
        if request.finish_reason is not None:
            self.drafter.close(request)
            return False
        if not commit.tokens:  # only prompt tokens were scored
            return False
        hit = self.drafter.commit(request, commit.tokens)
        request.stats.hits += hit
        return hit


def _counts(step: Step, commits: Sequence[RequestCommit]) -> dict[str, int]:
    return {
        "sequences": step.forest.num_trees,
        "rows": step.num_rows,
        "nodes": len(step.forest),
        "depth": max(step.forest.nodes.depths.tolist(), default=0),
        "accepted": sum(commit.accepted for commit in commits),
        "committed": sum(len(commit.tokens) for commit in commits),
    }


class GuardedDrafter:
    """Passes on trees that can be verified, of requests that want speculation; a request's grammar cuts and extends
    its tree. A drafter that raises, or answers for another number of requests, is not asked again."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.drafter = drafter
        self._vocab_size = vocab_size

    @property
    def levels(self) -> int:
        return self._try(lambda: self.drafter.levels, 0)

    @property
    def computes(self) -> bool:
        return self.drafter.computes

    def propose(self, requests: Sequence[Request], limits: DraftLimits) -> Forest:
        speculates = limits.nodes > 0 and type(self.drafter) is not NoDrafter
        wants = [speculates and request.max_nodes != 0 for request in requests]
        asked = [request for request, wanted in zip(requests, wants, strict=True) if wanted]
        empty = Forest.of([Guesses() for _ in asked])
        return (self._try(lambda: self._verifiable(asked, limits), empty) if asked else empty).among(wants)

    def late(self, requests: Sequence[Request], trees: Forest, limits: DraftLimits) -> frozenset[int]:
        if limits.nodes == 0 or type(self.drafter) is NoDrafter:
            return frozenset()
        of_each = zip(requests, trees.sizes.tolist(), strict=True)
        return frozenset(request.id for request, size in of_each if not size and request.max_nodes != 0)

    def expect(self, requests: Sequence[Request]) -> None:
        wanting = [request for request in requests if request.max_nodes != 0]
        if wanting:
            self._try(lambda: self.drafter.expect(wanting), None)

    def verified(self, requests: Sequence[Request], trees: Forest) -> None:
        self._try(lambda: self.drafter.verified(requests, trees), None)

    def commit(self, request: Request, tokens: Sequence[int]) -> bool:
        return bool(self._try(lambda: self.drafter.commit(request, tokens), False))

    def gather(self) -> None:
        self._try(lambda: self.drafter.gather(), None)

    def flush(self) -> None:
        self._try(lambda: self.drafter.flush(), None)

    def pause(self, request: Request) -> None:
        self._try(lambda: self.drafter.pause(request), None)

    def close(self, request: Request) -> None:
        self._try(lambda: self.drafter.close(request), None)

    def _verifiable(self, requests: Sequence[Request], limits: DraftLimits) -> Forest:
        """An empty tree replaces each that breaks a rule."""
        trees = self.drafter.propose(requests, limits)
        if len(trees) != len(requests):
            self._drop(f"{len(trees)} trees for {len(requests)} requests")
            trees = [Guesses() for _ in requests]
        forest = Forest.of(trees)
        broken = set(forest.owners[~_lawful(forest, self._vocab_size)].tolist()) if len(forest) else ()
        if not broken and all(request.grammar is None for request in requests):
            return forest
        lawful = [Guesses() if index in broken else tree for index, tree in enumerate(trees)]
        pairs = zip(lawful, requests, strict=True)
        return Forest.of([t if r.grammar is None else constrained(t, r.grammar, limits.nodes) for t, r in pairs])

    def _try(self, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except Exception as error:
            self._drop(f"{type(error).__name__}: {error}")
            return otherwise

    def _drop(self, reason: str) -> None:
        logger.error("the drafter failed and is not asked again: %s", reason, exc_info=True)
        self.drafter = NoDrafter()


def _lawful(forest: Forest, vocab_size: int) -> NDArray[np.bool_]:
    """Nodes after their parents, one deeper and no likelier, with a token of the vocabulary; no NaN scores."""
    nodes, places = forest.nodes, np.arange(len(forest))
    below_root = nodes.parents == ROOT
    parents = np.where((nodes.parents >= forest.starts[forest.owners]) & (nodes.parents < places), nodes.parents, 0)
    depths = np.where(below_root, 1, nodes.depths[parents] + 1)
    scores = np.where(below_root, 0.0, nodes.scores[parents])
    known = (nodes.tokens >= 0) & (nodes.tokens < vocab_size)
    lawful: NDArray[np.bool_] = (
        known & (below_root | (parents == nodes.parents)) & (nodes.depths == depths) & (nodes.scores <= scores)
    )
    return lawful


class AskedLogprobs(Struct, frozen=True):
    place: int  # of the commit that gets them
    field: str  # which of its fields
    rows: list[int]
    tokens: list[int]
    top: int


def with_logprobs(
    commits: Sequence[RequestCommit], step: Step, scoring: Mapping[int, range], outcome: Outcome
) -> list[RequestCommit]:
    """`scoring`: kept rows that score prompts, by request. Requests for equally many tokens are scored together."""
    told, by_top = list(commits), defaultdict[int, list[AskedLogprobs]](list)
    for one in _asked(commits, step, scoring):
        by_top[one.top].append(one)
    for top, asked in by_top.items():
        rows, tokens = [row for one in asked for row in one.rows], [token for one in asked for token in one.tokens]
        scored = iter(outcome.logprobs(rows, tokens, top))
        for one in asked:
            told[one.place] = replace(told[one.place], **{one.field: list(islice(scored, len(one.rows)))})
    return told


def _asked(commits: Sequence[RequestCommit], step: Step, scoring: Mapping[int, range]) -> Iterator[AskedLogprobs]:
    for place, commit in enumerate(commits):
        request, params = commit.request, commit.request.params
        if params.logprobs is not None and commit.tokens:
            rows = step.sample_rows[commit.samples].tolist()
            yield AskedLogprobs(place, "logprobs", rows, commit.tokens, params.logprobs)
        if commit.scored:
            assert params.prompt_logprobs is not None  # or nothing would be scored
            tokens = [request.tokens[index + 1] for index in commit.scored]
            yield AskedLogprobs(place, "prompt_logprobs", [*scoring[request.id]], tokens, params.prompt_logprobs)
