"""From tasks that a small and a large model did alone to a threshold between them. Pure.

half of the tasks ─► every threshold: who answers, what succeeds ─► the lowest that loses little enough
the other half    ─► what that one is worth
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pilotfish.cli.bench.report import Row
from pilotfish.operate.cascade_policy import NOBODY

#: Thresholds are rounded down to so many parts of 1.
STEPS = 10_000
#: A share that is too low by less is not.
ROUNDING = 1e-9


@dataclass(frozen=True)
class CascadedTask:
    """A task that both models did, and how sure the small one was."""

    category: str
    confidence: float  # mean log-probability of its first tokens
    small: bool  # whether its output succeeded
    large: bool

    def answered_by_small(self, threshold: float) -> bool:
        return self.confidence >= threshold


@dataclass(frozen=True)
class CascadeOutcome:
    threshold: float
    answered_by_small: float  # share of the tasks
    success: float  # likewise, of the cascade
    small_success: float  # of the small model alone
    large_success: float
    tasks: int

    def row(self) -> Row:
        return dict(vars(self))


def outcome(tasks: Sequence[CascadedTask], threshold: float) -> CascadeOutcome:
    stays = [task.answered_by_small(threshold) for task in tasks]
    successes = [task.small if stay else task.large for task, stay in zip(tasks, stays, strict=True)]
    small, large = (share([getattr(task, side) for task in tasks]) for side in ("small", "large"))
    return CascadeOutcome(threshold, share(stays), share(successes), small, large, len(tasks))


def share(of: Sequence[bool]) -> float:
    return sum(of) / len(of)


def outcomes(tasks: Sequence[CascadedTask]) -> list[CascadeOutcome]:
    """Of every threshold that differs from the one before, the lowest first: there the small model answers all. At the
    last one it answers nothing."""
    found = {math.floor(task.confidence * STEPS) / STEPS for task in tasks}
    return [outcome(tasks, threshold) for threshold in (*sorted(found), NOBODY)]


def chosen(found: Sequence[CascadeOutcome], loss: float) -> CascadeOutcome:
    """The lowest threshold whose success is that of the large model less `loss` or more."""
    return next(one for one in found if one.success >= one.large_success - loss - ROUNDING)


def halves(tasks: Sequence[CascadedTask]) -> tuple[list[CascadedTask], list[CascadedTask]]:
    """Tasks of each category in turn: those to choose by, and those to judge by."""
    counts, choosing, judging = defaultdict[str, int](int), list[CascadedTask](), list[CascadedTask]()
    for task in tasks:
        (judging if counts[task.category] % 2 else choosing).append(task)
        counts[task.category] += 1
    return choosing, judging
