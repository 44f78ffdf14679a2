"""The target's loop: plan, propose, schedule, forward, sample, commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch

from pilotfish.core.budget import Budget, Load
from pilotfish.core.drafter import Drafter
from pilotfish.core.request import FinishReason, Request
from pilotfish.core.scheduler import Commit, Rows, Scheduler, Step
from pilotfish.core.tree import ROOT
from pilotfish.model.logprobs import token_logprobs
from pilotfish.model.pacer import Pacer, held
from pilotfish.model.runner import NodeRows, Runner, SequenceRows
from pilotfish.model.sampling import RowSampling, non_finite_rows, sample, without_rows
from pilotfish.observe.records import ObserveStep, StepRecord
from pilotfish.target.guard import GuardedDrafter


@dataclass
class StepTimes:
    """Seconds spent in each part of the loop, summed over steps."""

    steps: int = 0
    draft: float = 0.0
    schedule: float = 0.0
    rows: float = 0.0
    forward: float = 0.0
    verify: float = 0.0
    commit: float = 0.0

    def add(self, record: StepRecord) -> None:
        """One more step."""
        self.steps += 1
        self.draft += record.drafted - record.planned
        self.schedule += record.planned - record.began + record.scheduled - record.drafted
        self.rows += record.prepared - record.scheduled
        self.forward += record.computed - record.prepared
        self.verify += record.verified - record.computed
        self.commit += record.ended - record.verified

    def minus(self, other: StepTimes) -> StepTimes:
        """What was spent since `other` was taken."""
        return StepTimes(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


class TargetWorker:
    """Runs requests to their end over one model. All state of requests changes in the scheduler."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        drafter: Drafter,
        budget: Budget,
        pacer: Pacer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`pacer` holds back what the device does in a step: the forward, and sampling."""
        self.runner = runner
        self.scheduler = scheduler
        self.drafter = GuardedDrafter(drafter, runner.model.shape.vocab_size)
        self.budget = budget
        self.pacer = pacer
        self.times = StepTimes()
        self.observe: ObserveStep = _ignore
        self._clock = clock
        self._ended = clock()

    def step(self) -> list[Commit]:
        """One forward over every running request; what it committed. A forward that fails ends the
        requests that were in it, frees all they held, and raises."""
        began = self._clock()
        plan = self.scheduler.plan()
        for request in plan.preempted:
            self.drafter.close(request)
        planned = self._clock()
        requests = [chunk.request for chunk in plan.chunks if chunk.complete]
        load = Load(len(requests), sum(chunk.count for chunk in plan.chunks))
        trees = self.drafter.propose(requests, self.budget.limits(load, planned))
        drafted = self._clock()
        nodes = self.budget.nodes(load, trees, drafted - planned, self.drafter.levels)
        step = self.scheduler.schedule(plan.chunks, trees, nodes)
        scheduled = self._clock()
        try:
            batch = self.runner.prepare([_sequence_rows(rows) for rows in step.rows])
            prepared, kept = self._clock(), KeptRows.of(step)
            with held(self.pacer, step.num_rows):
                logits = self.runner.run(batch)
                began_sampling = self._clock()
                outcome = _outcome(logits, kept, step)
                sampling = self._clock() - began_sampling
            verified = self._clock()
            computed = verified - sampling  # what is paced is the forward, as far as the times tell
        except BaseException:  # an interrupt too
            for request in self.scheduler.cancel(step):
                self.drafter.close(request)
            raise
        committed = self.scheduler.commit(step, outcome.sampled, outcome.unscored)
        try:
            commits = [_with_logprobs(commit, logits, kept) for commit in committed]
        except BaseException:
            for rows in step.rows:
                self.scheduler.abort(rows.request)
                self.drafter.close(rows.request)
            raise
        hits = sum([self._tell_drafter(commit) for commit in commits])
        before, self._ended = self._ended, self._clock()
        moments = (before, began, planned, drafted, scheduled, prepared, computed, verified, self._ended)
        record = StepRecord(
            *moments,
            sequences=len(requests),
            rows=step.num_rows,
            nodes=sum(len(rows.tree) for rows in step.rows),
            depth=max(max(rows.tree.depths) for rows in step.rows),
            offered=sum(map(len, trees)),
            accepted=sum(commit.accepted for commit in committed),
            committed=sum(len(commit.tokens) for commit in committed),
            hits=hits,
        )
        self.times.add(record)
        self.observe(record)
        self.budget.observe(step, committed, self._ended - began - (drafted - planned))
        return commits

    def abort(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request between two steps; all it held is free when this returns."""
        if request.finish_reason is None:
            self.scheduler.abort(request, reason)
            self.drafter.close(request)

    def _tell_drafter(self, commit: Commit) -> bool:
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


def _ignore(record: StepRecord) -> None:
    """Nobody observes."""


@dataclass(frozen=True)
class KeptRows:
    """Which of a forward's rows of logits sample, and which score prompt tokens."""

    sampling: list[int]
    scoring: dict[int, range]  # by request id, where there are any

    @classmethod
    def of(cls, step: Step) -> KeptRows:
        sampling: list[int] = []
        scoring: dict[int, range] = {}
        row = 0
        for rows in step.rows:
            if rows.scored:
                scoring[rows.request.id] = range(row, row + len(rows.scored))
                row += len(rows.scored)
            sampling.extend(range(row, row + rows.num_samples))
            row += rows.num_samples
        return cls(sampling, scoring)

    def sampling_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """[sampling rows, vocab] of [kept rows, vocab]."""
        return logits[self.sampling] if self.scoring else logits


@dataclass(frozen=True)
class Outcome:
    """The target's token after each sampling row, None after a row whose logits are not finite; the requests (ids) with
    prompt tokens that cannot be scored for that reason."""

    sampled: Sequence[int | None]
    unscored: set[int]


def _outcome(logits: torch.Tensor, kept: KeptRows, step: Step) -> Outcome:
    """Sample where that can be done. logits [kept rows, vocab], raw."""
    broken = set(non_finite_rows(logits))
    if broken:
        logits = without_rows(logits, sorted(broken))
    tokens = sample(kept.sampling_logits(logits), _row_sampling(step)) if step.num_samples else []
    if not broken:
        return Outcome(tokens, set())
    sampled = [None if row in broken else token for row, token in zip(kept.sampling, tokens, strict=True)]
    return Outcome(sampled, {request for request, rows in kept.scoring.items() if not broken.isdisjoint(rows)})


def _with_logprobs(commit: Commit, logits: torch.Tensor, kept: KeptRows) -> Commit:
    """The commit with the log-probabilities that its request asks for."""
    request, params = commit.request, commit.request.params
    if params.logprobs is not None and commit.tokens:
        rows = [kept.sampling[row] for row in commit.sampled_rows]
        commit = replace(commit, logprobs=token_logprobs(logits[rows], commit.tokens, params.logprobs))
    if commit.scored:
        assert params.prompt_logprobs is not None  # or nothing would be scored
        tokens = [request.tokens[index + 1] for index in commit.scored]
        scoring = logits[list(kept.scoring[request.id])]
        commit = replace(commit, prompt_logprobs=token_logprobs(scoring, tokens, params.prompt_logprobs))
    return commit


def _sequence_rows(rows: Rows) -> SequenceRows:
    request, start = rows.request, rows.request.num_computed
    trunk = request.slots[: start + rows.count].copy()
    trunk[start:] = rows.slots[: rows.count]
    return SequenceRows(
        start=start,
        tokens=request.tokens[start : start + rows.count],
        trunk_slots=trunk,
        nodes=NodeRows.of(rows.tree, dict(zip(rows.tree.nodes(), rows.slots[rows.count :], strict=True))),
        kept=[*(index - start for index in rows.scored), *([rows.count - 1] if rows.samples else [])],
    )


def _row_sampling(step: Step) -> list[RowSampling]:
    """How each sampling row's token is drawn: its index is one past the row's own."""
    return [_node_sampling(rows, node) for rows in step.rows if rows.samples for node in (ROOT, *rows.tree.nodes())]


def _node_sampling(rows: Rows, node: int) -> RowSampling:
    request, depth = rows.request, rows.tree.depths[node]
    edits = None if request.rules is None else request.edits(rows.tree.path_tokens(node))
    return RowSampling(request.params, request.seed, len(request.tokens) + depth, edits)
