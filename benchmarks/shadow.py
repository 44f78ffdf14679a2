"""What a shadow costs those who are served, and how far what it promises is from what the same draft does when live."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from draft_pools import pools_beside
from harness import PAIR, Options, run

from pilotfish.cli.bench.contestants import Run, contestant_of, joined, rates
from pilotfish.cli.bench.report import ProgressBar, Report, Row, Spread, equal_share, ratios
from pilotfish.config.engine import EngineConfig
from pilotfish.engine.drafts.shadow_drafts import ShadowDrafts
from pilotfish.engine.engine import Engine
from pilotfish.engine.pools.remote_pools import LOADING
from pilotfish.engine.processes.launch import wait_until
from pilotfish.wire.serving import ShadowReport

#: The least share of its speed that a shadow may leave a target, and by how much it may promise too much or too little.
FLOOR, TOLERANCE = 0.98, 0.07
#: Seconds that a shadow may take to follow to its end what it was told of.
PATIENCE = 120.0


@dataclass
class ShadowedRuns:
    """Of one engine: the same requests without its shadow and with it, in turn, and what the shadow said at the end."""

    without: list[Run] = field(default_factory=list)
    beside: list[Run] = field(default_factory=list)
    cpu_seconds: float = 0.0  # that the shadow took in `beside`
    last: ShadowReport | None = None

    def row(self, live: str) -> Row:
        assert self.last is not None
        alone, beside = rates(self.without), rates(self.beside)
        return {
            "live": live,
            "without": Spread.of(alone),
            "with_shadow": Spread.of(beside),
            "kept": ratios(beside, alone),
            "equal_outputs": equal_share(joined(self.beside).outputs, joined(self.without).outputs),
            "live_rate": self.last.live_tokens_per_second,
            "promised": self.last.tokens_per_second,
            "tokens_per_step": self.last.tokens_per_step,
            "late_share": self.last.late / max(self.last.steps, 1),
            "step_error": self.last.error,
            "cpu_share": self.cpu_seconds / sum(run.seconds for run in self.beside),
        }


def run_shadow(options: Options, progress: ProgressBar) -> Report:
    """The same draft in two pools: live, and as a shadow beside no speculation and beside itself. In either engine the
    same requests run without and with the shadow, in turns, `repeats` times."""
    progress.total = 2 * (1 + 2 * options.repeats)
    with pools_beside(options.engine_config(mode="off"), 2) as (pools, config):
        live, shadow = (pool.told["endpoint"] for pool in pools)
        off = replace(config, shadow_pool=(shadow,))
        engines = {"off": off, "async": replace(off, mode="async", draft_pool=(live,))}
        runs = {name: _runs(name, own, options, progress) for name, own in engines.items()}
    return Report(shadow_results([measured.row(name) for name, measured in runs.items()]))


def _runs(name: str, config: EngineConfig, options: Options, progress: ProgressBar) -> ShadowedRuns:
    jobs, found = options.workload().jobs(len(options.rows()), 0), ShadowedRuns()
    with Engine(config) as engine:
        shadows = engine.shadows
        assert shadows is not None  # as there is a pool for it
        wait_until(lambda: shadows.reports()[0].ready, lambda: None, LOADING, "shadow")
        contestant = contestant_of(engine)
        run = partial(contestant.run, engine, jobs, options.streams)
        run()
        progress(f"{name}, warm-up")
        try:
            for turn in range(options.repeats):
                for beside in (turn % 2 == 0, turn % 2 != 0):
                    _take_turn(engine, shadows, found, run, beside=beside)
                    progress(f"{name}, {'with' if beside else 'without'} a shadow")
        finally:
            engine.shadows = shadows  # which closes with it
    return found


def _take_turn(
    engine: Engine, shadows: ShadowDrafts, found: ShadowedRuns, run: Callable[[], Run], *, beside: bool
) -> None:
    """A shadow follows requests that have ended: it is busy once some have, and for a while after it is left alone."""
    if not beside:
        engine.shadows = None
        wait_until(lambda: not shadows.busy, lambda: None, PATIENCE, "shadow: what it was told of")
        found.without.append(run())
        return
    engine.shadows = shadows
    run()
    before = shadows.reports()[0].cpu_seconds
    found.beside.append(run())
    found.last = shadows.reports()[0]
    found.cpu_seconds += found.last.cpu_seconds - before


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


if __name__ == "__main__":
    run(run_shadow, *PAIR, "nodes", "leaves", "budget", limit=12, pace="target=60ms,draft=15ms", streams=4, repeats=6)
