"""What a draft worker's levels took while a bench ran, from the timeline that it writes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pilotfish.cli.bench.contestants import Run
from pilotfish.cli.bench.report import Row


@dataclass(frozen=True)
class Level:
    began: float  # seconds, on the clock of the steps' records
    ended: float
    leaves: int
    prompt_rows: int
    taken: float = 0.0  # of its pace, by itself; above 1 it overran

    @classmethod
    def of(cls, event: dict[str, Any]) -> Level:
        began, args = event["ts"] / 1e6, event["args"]
        return cls(began, began + event["dur"] / 1e6, args["leaves"], args["prompt_rows"], args.get("taken", 0.0))


def read_levels(timeline: Path) -> list[Level]:
    events = json.loads(timeline.read_text("utf-8"))["traceEvents"]
    return [Level.of(event) for event in events if event["name"] == "level"]


def levels_during(run: Run, levels: Sequence[Level]) -> list[Level]:
    return [level for level in levels if run.steps and run.steps[0].began <= level.began <= run.steps[-1].ended]


def levels_of(runs: Sequence[Run], levels: Sequence[Level]) -> Row:
    """Milliseconds of a level, pace included, and from the end of one to the beginning of the next, where neither had
    rows of prompts; of the levels during some runs. The median: a draft that waits, because its trees are large enough,
    has nothing to do between two levels."""
    pairs = [
        pair
        for run in runs
        for pair in pairwise(levels_during(run, levels))
        if not any(one.prompt_rows for one in pair)
    ]
    if not pairs:
        return {}
    return {
        "levels": len(pairs),
        "leaves": statistics.mean(level.leaves for _, level in pairs),
        "level_ms": statistics.mean(1000 * (level.ended - level.began) for _, level in pairs),
        "between_levels_ms": statistics.median(1000 * (level.began - before.ended) for before, level in pairs),
    }
