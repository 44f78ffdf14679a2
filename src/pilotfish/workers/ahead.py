from dataclasses import dataclass, replace

from pilotfish.core.drafting.drafter import NO_GUESSES, NoDrafter
from pilotfish.core.scheduling.budget import StepLoad
from pilotfish.core.scheduling.executor import Launched, LaunchingExecutor
from pilotfish.core.scheduling.step import RequestCommit
from pilotfish.workers.target import BegunStep, TargetWorker

BEGINNING = ("began", "planned", "drafted", "scheduled")


@dataclass(frozen=True)
class LaunchedStep:
    begun: BegunStep
    forward: Launched


class AheadWorker(TargetWorker):
    """The device computes the next forward while a step's outcome is told: text, statistics, answers. With drafts it
    waits for what the next step hangs on: commits, trees, rows.

    device   │ forward 1 │                  │ forward 2              │                  │ forward 3
    host                  settle 1 · begin 2  conclude 1 · answers 1   settle 2 · begin 3  ...

    Without drafts the next forward is launched before this one's tokens are known, and the device waits for nothing.

    device   │ forward 1 │ forward 2           │ forward 3           │ forward 4
    host      launch 2    settle 1 · launch 3   settle 2 · launch 4   ...
    """

    executor: LaunchingExecutor
    _ahead: LaunchedStep | None = None

    @property
    def busy(self) -> bool:
        return super().busy or self._ahead is not None

    def check(self) -> None:
        self.scheduler.check(None if self._ahead is None else self._ahead.begun.step)

    def step(self) -> list[RequestCommit]:
        launched = self._ahead or self._launched(self.begin())
        self._ahead = None
        if launched is None:
            return self._idle()
        try:
            self._ahead = self._launched(self._following(launched))
            outcome = launched.forward.collect()
        except BaseException:
            for lost in (launched, self._ahead):
                if lost is not None:
                    self.fail(lost.begun.step)
            self._ahead = None
            raise
        # What was done beside the step before took this one no time.
        moments = {name: max(getattr(launched.begun, name), self._ended) for name in BEGINNING}
        settled = self.settle(replace(launched.begun, **moments), outcome)
        self._ahead = self._ahead or self._launched(self.begin())
        return self.conclude(settled)

    def _following(self, launched: LaunchedStep) -> BegunStep | None:
        if not launched.forward.leaves_tokens or type(self.drafter.drafter) is not NoDrafter:
            return None
        self.arrive()
        began = self._clock()
        step = self.scheduler.follow(launched.begun.step)
        if step is None:
            return None
        load = StepLoad(len(step.chunks), step.num_rows, 0)
        return BegunStep(step, load, NO_GUESSES, 0, frozenset(), began, began, began, self._clock())

    def _launched(self, begun: BegunStep | None) -> LaunchedStep | None:
        if begun is None:
            return None
        try:
            return LaunchedStep(begun, self.executor.launch(begun.step.rows(), self._sampling(begun.step)))
        except BaseException:
            self.fail(begun.step)
            raise
