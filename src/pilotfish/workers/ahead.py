from collections.abc import Sequence
from dataclasses import dataclass, replace

from pilotfish.core.drafting.drafter import NO_GUESSES, NoDrafter
from pilotfish.core.scheduling.budget import StepLoad
from pilotfish.core.scheduling.executor import Launched, LaunchingExecutor, Outcome
from pilotfish.core.scheduling.step import RequestCommit
from pilotfish.workers.target import BegunStep, TargetWorker

BEGINNING = ("began", "planned", "drafted", "scheduled")


@dataclass(frozen=True)
class FailedLaunch:
    """What failed is raised in place of the outcome: first the step before is told."""

    error: Exception
    leaves_tokens = False

    def collect(self) -> Outcome:
        raise self.error


@dataclass(frozen=True)
class LaunchedStep:
    begun: BegunStep | None  # None: it failed before
    forward: Launched


class AheadWorker(TargetWorker):
    """The device computes the next forward while a step's outcome is told: text, statistics, answers. With drafts it
    waits for what the next step hangs on: commits, trees, rows.

    device   │ forward 1 │                  │ forward 2              │                  │ forward 3
    host                  commit 1 · begin 2  conclude 1 · answers 1   commit 2 · begin 3  ...

    Without drafts the next forward is launched before this one's tokens are known, and the device waits for nothing.

    device   │ forward 1 │ forward 2           │ forward 3           │ forward 4
    host      launch 2    commit 1 · launch 3   commit 2 · launch 4   ...
    """

    executor: LaunchingExecutor
    _ahead: LaunchedStep | None = None

    @property
    def busy(self) -> bool:
        return super().busy or self._ahead is not None

    def check(self) -> None:
        begun = None if self._ahead is None else self._ahead.begun
        self.scheduler.check(None if begun is None else begun.step)

    def step(self) -> list[RequestCommit]:
        self._ahead = self._ahead or self._begun_and_launched()
        if self._ahead is None:
            return self._idle()
        if self._may_follow(self._ahead):
            self.take_in()
        launched, self._ahead = self._ahead, None
        try:
            self._ahead = self._following(launched)
            outcome = launched.forward.collect()
        except BaseException:
            for lost in (launched, self._ahead):
                if lost is not None and lost.begun is not None:
                    self.fail(lost.begun.step)
            self._ahead = None
            raise
        assert launched.begun is not None
        # What was done beside the step before took this one no time.
        moments = {name: max(getattr(launched.begun, name), self._ended) for name in BEGINNING}
        committed = self.commit(replace(launched.begun, **moments), outcome)
        if self._ahead is None and not self._is_awaited(committed.commits):
            self._ahead = self._begun_and_launched()
        else:
            self.drafter.flush()
        return self.conclude(committed)

    def _tell(self) -> None:
        self.drafter.gather()

    def _is_awaited(self, commits: Sequence[RequestCommit]) -> bool:
        """Whether a request's first token or its end would wait for drafting."""
        return self.drafter.computes and any(
            commit.request.finish_reason is not None
            or len(commit.request.tokens) == commit.request.num_prompt_tokens + len(commit.tokens)
            for commit in commits
        )

    def _begun_and_launched(self) -> LaunchedStep | None:
        begun = None
        try:
            begun = self.begin()
            launched = None if begun is None else self._launched(begun)
        except BaseException as error:
            if isinstance(error, Exception):
                return LaunchedStep(begun, FailedLaunch(error))
            if begun is not None:
                self.fail(begun.step)
            raise
        self.drafter.flush()
        return launched

    def _launched(self, begun: BegunStep) -> LaunchedStep:
        return LaunchedStep(begun, self.executor.launch(begun.step.rows(), self._sampling(begun.step)))

    def _may_follow(self, launched: LaunchedStep) -> bool:
        return launched.forward.leaves_tokens and type(self.drafter.drafter) is NoDrafter

    def _following(self, launched: LaunchedStep) -> LaunchedStep | None:
        if launched.begun is None or not self._may_follow(launched):
            return None
        began = self._clock()
        step = self.scheduler.follow(launched.begun.step)
        if step is None:
            return None
        load = StepLoad(len(step.chunks), step.num_rows, 0)
        begun = BegunStep(step, load, NO_GUESSES, 0, frozenset(), began, began, began, self._clock())
        try:
            return self._launched(begun)
        except BaseException:
            self.fail(step)
            raise
