"""One record for each step of a target and each level of a draft. Times are seconds of one host's monotonic clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class StepRecord:
    """A step of the target, from one moment to the next:

    before  began   planned  drafted  scheduled  prepared  computed  verified  ended
    ─ waiting ─ plan ─── draft ── schedule ── rows ─── forward ── verify ── send ─
    """

    before: float  # when the step before ended
    began: float
    planned: float
    drafted: float
    scheduled: float
    prepared: float
    computed: float
    verified: float
    ended: float
    sequences: int  # that sampled
    rows: int
    nodes: int  # of them, of trees
    depth: int  # of the deepest tree
    offered: int  # nodes in the trees before the budget's choice
    accepted: int  # nodes
    committed: int  # tokens
    hits: int  # sequences whose bonus token was in a tree that lives on

    @property
    def misses(self) -> int:
        return self.sequences - self.hits

    @property
    def parts(self) -> dict[str, tuple[float, float]]:
        """Beginning and end of each part, in order."""
        moments = (
            *(self.before, self.began, self.planned, self.drafted, self.scheduled),
            *(self.prepared, self.computed, self.verified, self.ended),
        )
        names = ("waiting", "plan", "draft", "schedule", "rows", "forward", "verify", "send")
        return {name: (moments[i], moments[i + 1]) for i, name in enumerate(names)}


@dataclass(frozen=True)
class LevelRecord:
    """A level of a draft."""

    began: float
    ended: float
    sessions: int
    leaves: int
    prompt_rows: int
    nodes: int  # added
    used: int  # nodes committed since the level before
    wasted: int  # nodes dropped since the level before


ObserveStep = Callable[[StepRecord], None]
ObserveLevel = Callable[[LevelRecord], None]
