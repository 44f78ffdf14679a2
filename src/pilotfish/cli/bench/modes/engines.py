"""Engines that settings are played in, a few of them loaded at a time."""

import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from pilotfish.cli.bench.contestants import Contestant, Run, take_turns
from pilotfish.cli.bench.modes.settings import Setting
from pilotfish.cli.bench.report import ProgressBar, Row
from pilotfish.cli.bench.workload import Job
from pilotfish.config.engine import EngineConfig
from pilotfish.engine.engine import Engine


class OpenEngine:
    """A loaded engine, and the contestants in it, which keep what their budgets learn. While it plays, this process is
    on the cores that the engine chose; beside an idle one the cores of its draft are free."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = Engine(config)
        self._cores, self._threads = os.sched_getaffinity(0), torch.get_num_threads()
        self._contestants: dict[str, Contestant] = {}

    def play(self, setting: Setting, jobs: Sequence[Job], concurrency: int, done: Callable[[], None]) -> Run:
        """`overruns` of the run are the larger share of the paced models in this process."""
        os.sched_setaffinity(0, self._cores)
        torch.set_num_threads(self._threads)
        if setting.name not in self._contestants:
            self._contestants[setting.name] = setting.contestant(self.engine)
        self.engine.reset_pacing()
        run = self._contestants[setting.name].run(self.engine, jobs, concurrency, done)
        return replace(run, overruns=max((pacer.share for pacer in self.engine.pacing()), default=0.0))


class Engines:
    """Engines over one configuration, `most` of them loaded at a time: of more, the one opened first is closed for the
    next. `levels` of drafts, by the setting that they drafted for, are known once all are closed."""

    def __init__(self, base: EngineConfig, most: int) -> None:
        self._base, self._most = base, most
        self._open: dict[EngineConfig, OpenEngine] = {}
        self._cores, self._threads = os.sched_getaffinity(0), torch.get_num_threads()
        self._directory = TemporaryDirectory()
        self._timelines: list[tuple[EngineConfig, Path]] = []
        self._played: dict[str, EngineConfig] = {}  # by setting
        self.levels: dict[str, list[Level]] = {}

    def play(
        self, settings: Sequence[Setting], rounds: Sequence[Sequence[Job]], concurrency: int, progress: ProgressBar
    ) -> dict[str, list[Run]]:
        """Settings take turns in every round, after one that does not count; their runs by name."""

        def run(setting: Setting, jobs: Sequence[Job]) -> Run:
            done = partial(progress, f"{setting.name}, {concurrency} at a time")
            return self.of(setting).play(setting, jobs, concurrency, done)

        return take_turns({one.name: partial(run, one) for one in settings}, rounds)

    def of(self, setting: Setting) -> OpenEngine:
        config = self._played[setting.name] = setting.engine_config(self._base)
        if config not in self._open:
            while len(self._open) >= self._most:
                self._close(next(iter(self._open)))
            os.sched_setaffinity(0, self._cores)  # it divides those that this process may use
            self._open[config] = OpenEngine(self._traced(config))
        return self._open[config]

    def _traced(self, config: EngineConfig) -> EngineConfig:
        if config.mode != "async":
            return config
        path = Path(self._directory.name) / f"{len(self._timelines)}.json"
        self._timelines.append((config, path))
        return replace(config, trace=path)

    def _close(self, config: EngineConfig) -> None:
        self._open.pop(config).engine.close()

    def __enter__(self) -> "Engines":
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            self._close(next(iter(self._open)))
        os.sched_setaffinity(0, self._cores)
        torch.set_num_threads(self._threads)
        read = [(config, read_levels(path)) for config, path in self._timelines if path.is_file()]
        for name, played in self._played.items():
            self.levels[name] = [level for config, levels in read if config == played for level in levels]
        self._directory.cleanup()


@dataclass(frozen=True)
class Level:
    began: float  # seconds, on the clock of the steps' records
    ended: float
    leaves: int
    prompt_rows: int
    taken: float = 0.0  # of its pace, by itself; above 1 it overran

    @classmethod
    def of(cls, event: dict[str, Any]) -> "Level":
        began, args = event["ts"] / 1e6, event["args"]
        return cls(began, began + event["dur"] / 1e6, args["leaves"], args["prompt_rows"], args.get("taken", 0.0))


def read_levels(timeline: Path) -> list[Level]:
    events = json.loads(timeline.read_text("utf-8"))["traceEvents"]
    return [Level.of(event) for event in events if event["name"] == "level"]


def levels_during(run: Run, levels: Sequence[Level]) -> list[Level]:
    return [level for level in levels if run.steps and run.steps[0].began <= level.began <= run.steps[-1].ended]


def level_pairs(run: Run, levels: Sequence[Level]) -> list[tuple[Level, Level]]:
    """Levels during a run, each with the one after it, where neither had rows of prompts."""
    following = pairwise(levels_during(run, levels))
    return [pair for pair in following if not any(one.prompt_rows for one in pair)]


def levels_of(runs: Sequence[Run], levels: Sequence[Level]) -> Row:
    """Milliseconds of a level, pace included, and from the end of one to the beginning of the next, where neither had
    rows of prompts; of the levels during some runs. The median: a draft that waits, because its trees are large enough,
    has nothing to do between two levels."""
    pairs = [pair for run in runs for pair in level_pairs(run, levels)]
    if not pairs:
        return {}
    return {
        "levels": len(pairs),
        "leaves": statistics.mean(level.leaves for _, level in pairs),
        "level_ms": statistics.mean(1000 * (level.ended - level.began) for _, level in pairs),
        "between_levels_ms": statistics.median(1000 * (level.began - before.ended) for before, level in pairs),
    }
