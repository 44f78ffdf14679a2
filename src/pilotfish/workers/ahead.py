from dataclasses import dataclass, replace

from pilotfish.core.drafting.drafter import NoDrafter
from pilotfish.core.scheduling.executor import Launched, LaunchingExecutor
from pilotfish.core.scheduling.step import RequestCommit
from pilotfish.workers.target import BegunStep, TargetWorker

BEGINNING = ("began", "planned", "drafted", "scheduled")


@dataclass(frozen=True)
class LaunchedStep:
    begun: BegunStep
    forward: Launched


class AheadWorker(TargetWorker):
    """Without drafts the next forward is launched before this one's tokens are known, so that a device waits for
    nothing that happens between two of them:

    device   │ forward 1 │ forward 2           │ forward 3           │ forward 4
    host      launch 2    commit 1 · launch 3   commit 2 · launch 4   ...
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
            return []
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
        return self.end(replace(launched.begun, **moments), outcome)

    def _following(self, launched: LaunchedStep) -> BegunStep | None:
        began = self._clock()
        if not launched.forward.leaves_tokens or type(self.drafter.drafter) is not NoDrafter:
            return None
        step = self.scheduler.follow(launched.begun.step)
        return None if step is None else BegunStep(step, 0, frozenset(), 0, began, began, began, self._clock())

    def _launched(self, begun: BegunStep | None) -> LaunchedStep | None:
        if begun is None:
            return None
        try:
            return LaunchedStep(begun, self.executor.launch(begun.step.rows(), self._sampling(begun.step)))
        except BaseException:
            self.fail(begun.step)
            raise
