"""The target's loop: plan, propose, schedule, forward, sample, commit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields

from pilotfish.core.drafter import Drafter
from pilotfish.core.request import FinishReason, Request
from pilotfish.core.scheduler import Commit, Rows, Scheduler, Step
from pilotfish.model.runner import Runner, SequenceRows
from pilotfish.model.sampling import RowSampling, sample
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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.drafter = GuardedDrafter(drafter, runner.model.shape.vocab_size)
        self.times = StepTimes()
        self._clock = clock

    def step(self) -> list[Commit]:
        """One forward over every running request; what it committed. A forward that fails ends the
        requests that were in it, frees all they held, and raises."""
        began = self._clock()
        chunks = self.scheduler.plan()
        planned = self._clock()
        trees = self.drafter.propose([chunk.request for chunk in chunks if chunk.complete])
        drafted = self._clock()
        step = self.scheduler.schedule(chunks, trees)
        scheduled = self._clock()
        try:
            batch = self.runner.prepare([_sequence_rows(rows) for rows in step.rows])
            prepared = self._clock()
            logits = self.runner.run(batch)
            computed = self._clock()
            sampled = sample(logits, _row_sampling(step)) if step.num_samples else []
        except BaseException:  # an interrupt too
            for request in self.scheduler.cancel(step):
                self.drafter.close(request)
            raise
        verified = self._clock()
        commits = self.scheduler.commit(step, sampled)
        for commit in commits:
            self._tell_drafter(commit)
        self.times.steps += 1
        self.times.schedule += planned - began + scheduled - drafted
        self.times.draft += drafted - planned
        self.times.rows += prepared - scheduled
        self.times.forward += computed - prepared
        self.times.verify += verified - computed
        self.times.commit += self._clock() - verified
        return commits

    def abort(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request between two steps; all it held is free when this returns."""
        if request.finish_reason is None:
            self.scheduler.abort(request, reason)
            self.drafter.close(request)

    def _tell_drafter(self, commit: Commit) -> None:
        if commit.request.finish_reason is None:
            self.drafter.commit(commit.request, commit.tokens)
        else:
            self.drafter.close(commit.request)


def _sequence_rows(rows: Rows) -> SequenceRows:
    request, start = rows.request, rows.request.num_computed
    nodes = list(rows.tree.nodes())
    trunk = request.slots[: start + rows.count].copy()
    trunk[start:] = rows.slots[: rows.count]
    return SequenceRows(
        start=start,
        tokens=request.tokens[start : start + rows.count],
        trunk_slots=trunk,
        tree=rows.tree,
        nodes=nodes,
        node_slots=dict(zip(nodes, rows.slots[rows.count :], strict=True)),
        sampled=rows.samples,
    )


def _row_sampling(step: Step) -> list[RowSampling]:
    """For each sampling row the index of the token it gives: one past the row's own."""
    return [
        RowSampling(rows.request.params, rows.request.seed, len(rows.request.tokens) + depth)
        for rows in step.rows
        if rows.samples
        for depth in rows.tree.depths
    ]
