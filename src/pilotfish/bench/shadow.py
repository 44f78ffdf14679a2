"""What a shadow costs those who are served, and how far what it promises is from what the same draft does when live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pilotfish.bench.options import BenchOptions
from pilotfish.bench.pools import EndlessStreams, Window
from pilotfish.bench.programs import pools_beside
from pilotfish.bench.report import ProgressBar, Report, Row, Spread, ratios
from pilotfish.config.engine import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.engine.launch import wait_until
from pilotfish.engine.remote_drafts import LOADING
from pilotfish.engine.shadow_drafts import ShadowDrafts
from pilotfish.wire.serving import ShadowReport

#: The least share of its speed that a shadow may leave a target, and by how much it may promise too much or too little.
FLOOR, TOLERANCE = 0.98, 0.07


@dataclass
class ShadowedWindows:
    """Of one engine: streams without its shadow and with it, in turn, and what the shadow said at the end."""

    without: list[Window] = field(default_factory=list)
    beside: list[Window] = field(default_factory=list)
    cpu_seconds: float = 0.0  # that the shadow took in `beside`
    last: ShadowReport | None = None

    def row(self, live: str) -> Row:
        assert self.last is not None
        alone, beside = ([_rate(window) for window in windows] for windows in (self.without, self.beside))
        return {
            "live": live,
            "without": Spread.of(alone),
            "with_shadow": Spread.of(beside),
            "kept": ratios(beside, alone),
            "live_rate": self.last.live_tokens_per_second,
            "promised": self.last.tokens_per_second,
            "tokens_per_step": self.last.tokens_per_step,
            "late_share": self.last.late / max(self.last.steps, 1),
            "step_error": self.last.error,
            "cpu_share": self.cpu_seconds / sum(window.seconds for window in self.beside),
        }


def _rate(window: Window) -> float:
    return window.rate(range(len(window.counts)))


def run_shadow(options: BenchOptions, progress: ProgressBar) -> Report:
    """The same draft in two pools: live, and as a shadow beside no speculation and beside itself. In either engine
    windows without and with the shadow take turns, `repeats` times."""
    progress.total = 2 * (1 + 2 * options.repeats)
    with pools_beside(options.engine_config(mode="off"), 2) as (pools, config):
        live, shadow = (pool.told["endpoint"] for pool in pools)
        off = replace(config, shadow_pool=(shadow,))
        engines = {"off": off, "async": replace(off, mode="async", draft_pool=(live,))}
        windows = {name: _windows(name, own, options, progress) for name, own in engines.items()}
    return Report(shadow_results([measured.row(name) for name, measured in windows.items()]))


def _windows(name: str, config: EngineConfig, options: BenchOptions, progress: ProgressBar) -> ShadowedWindows:
    with Engine(config) as engine:
        assert engine.shadows is not None  # as there is a pool for it
        try:
            return _take_turns(engine, engine.shadows, options, lambda part: progress(f"{name}, {part}"))
        finally:
            engine.abort_all()


def _take_turns(
    engine: Engine, shadows: ShadowDrafts, options: BenchOptions, done: Callable[[str], None]
) -> ShadowedWindows:
    wait_until(lambda: shadows.reports()[0].ready, lambda: None, LOADING, "shadow")
    found, streams = ShadowedWindows(), EndlessStreams(engine, options.workload(), options.streams)
    streams.run(lambda: shadows.busy)
    done("warm-up")
    try:
        for _ in range(options.repeats):
            engine.shadows = None
            streams.run(lambda: not shadows.busy)  # it follows to its end what it was told of
            found.without.append(streams.run_for(options.seconds))
            done("without a shadow")
            engine.shadows = shadows
            streams.run(lambda: shadows.busy)
            before = shadows.reports()[0].cpu_seconds
            found.beside.append(streams.run_for(options.seconds))
            found.last = shadows.reports()[0]
            found.cpu_seconds += found.last.cpu_seconds - before
            done("with a shadow")
    finally:
        engine.shadows = shadows  # which closes with it
    return found


def shadow_results(rows: Sequence[Row]) -> dict[str, Any]:
    """`rows` of off and of async, whose live rate is the truth about the draft."""
    truth = rows[1]["live_rate"]
    promises = [
        {"beside": row["live"], "promised": row["promised"], "live": truth, "error": row["promised"] / truth - 1}
        for row in rows
    ]
    cheap = all(row["kept"].median >= FLOOR for row in rows)
    exact = all(abs(promise["error"]) <= TOLERANCE for promise in promises)
    return {
        "engines": list(rows),
        "promises": promises,
        "floor": FLOOR,
        "tolerance": TOLERANCE,
        "holds": cheap and exact,
    }
