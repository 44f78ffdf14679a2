"""What an adaptive budget does while others take turns with it."""

from __future__ import annotations

from collections.abc import Sequence

from pilotfish.core.budget import AdaptiveBudget, Choice, Effort, StepLoad
from pilotfish.core.drafter import DraftLimits
from pilotfish.core.step import RequestCommit, Step
from pilotfish.core.tree import Forest


class WatchedBudget:
    """An adaptive budget, and what it does in steady load: while `concurrency` sequences sample. Its clock stands
    still while other contestants run, or each of its runs would begin with the probes that fell due meanwhile."""

    def __init__(self, budget: AdaptiveBudget, concurrency: int) -> None:
        self._budget, self._concurrency = budget, concurrency
        self._resumes = True  # whether the next step is the first of a run
        self._paused = 0.0  # seconds, up to this run
        self._now = 0.0  # of the last step, pauses left out
        self._steady = False  # whether the last step's load was
        self.clear()

    def clear(self) -> None:
        """Count from here on; what the budget has learned stays."""
        self.steps = self.probes = self.changes = 0
        self.seconds = 0.0
        self.last_choices: list[Choice] = []  # of each run

    def begin_run(self) -> None:
        """What comes next is another run, after a pause."""
        self._resumes, self._steady = True, False
        self.last_choices.append(self._budget.choice)

    def limits(self, load: StepLoad, now: float) -> DraftLimits:
        if self._resumes:
            self._resumes, self._paused = False, now - self._now
        before, last, self._now = self._budget.changes, self._now, now - self._paused
        limits = self._budget.limits(load, self._now)
        steady = load.sequences == self._concurrency
        if steady:
            self._count(limits)
        if steady and self._steady:  # a change on the first steady step is the load's doing
            self.changes += self._budget.changes - before
            self.seconds += self._now - last
        self._steady = steady
        return limits

    def _count(self, limits: DraftLimits) -> None:
        """A step in steady load."""
        self.steps += 1
        self.probes += (limits.levels > 0) != (self._budget.choice.effort is Effort.DRAFT)
        self.last_choices[-1] = self._budget.choice

    def nodes(self, load: StepLoad, offered: Forest, draft_seconds: float, levels: int) -> int:
        return self._budget.nodes(load, offered, draft_seconds, levels)

    def observe(self, step: Step, commits: Sequence[RequestCommit], forward_seconds: float) -> None:
        self._budget.observe(step, commits, forward_seconds)
