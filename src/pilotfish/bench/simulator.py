"""The simulator beside real runs whose devices are paced: tokens per second of modes, depths, concurrencies and paces;
and the load above which guessing stops to pay, with what the adaptive budget makes of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from msgspec import structs

from pilotfish.bench.contestants import OFF, PLAIN, Contestant, Run, always, compete, contestant_of, over, speed_of
from pilotfish.bench.options import BenchOptions
from pilotfish.bench.report import ProgressBar, Report, Row
from pilotfish.bench.speculation import ASYNC, WatchedBudget, parse_sync, sync_contestant, sync_name
from pilotfish.bench.workload import Job, parse_numbers
from pilotfish.config.engine import EngineConfig
from pilotfish.core.scheduling.budget import AdaptiveBudget, FixedBudget
from pilotfish.engine.costs import make_budget
from pilotfish.engine.engine import Engine
from pilotfish.errors import ParameterError
from pilotfish.plan.simulation.acceptance import AcceptanceTrace, read_acceptance
from pilotfish.plan.simulation.calibration import read_calibration
from pilotfish.plan.simulation.models import Cost
from pilotfish.plan.simulation.run import SimulatedRun, simulate
from pilotfish.plan.simulation.setup import HostCosts, Setup, Speculation, closed_load

ON, RULE = "on", "rule"
#: Rounds of a simulation, of which the last counts: real engines play one to warm up, too.
ROUNDS = 2
#: Share of the better of on and off that the rule may lose.
TOLERANCE = 0.03


class Twin:
    """Simulates what a real engine runs."""

    def __init__(self, options: BenchOptions, config: EngineConfig) -> None:
        self._trace: AcceptanceTrace = read_acceptance(Path(options.trace))
        self._host: HostCosts = read_calibration(Path(options.machine)).host
        self._config = config

    def run(self, speculation: Speculation, jobs: Sequence[Job], concurrency: int) -> SimulatedRun:
        target, draft = self._config.paces.target, self._config.paces.draft
        if target is None or draft is None:
            raise ParameterError("pace", self._config.pace, "of target and draft: the simulator knows no other devices")
        target_cost: Cost = lambda load: target.seconds(load.rows)  # noqa: E731
        draft_cost: Cost = lambda load: draft.seconds(load.rows)  # noqa: E731
        setup = Setup(
            target=target_cost, draft=draft_cost, speculation=speculation, host=self._host, max_requests=concurrency
        )
        load = closed_load(len(jobs), len(jobs), jobs[0].params.max_tokens, len(self._trace.prompts))
        return simulate(setup, self._trace, load, ROUNDS)


def run_simulator(options: BenchOptions, progress: ProgressBar) -> Report:
    """Every setting at every concurrency and pace: real rounds in turn, then their simulation, of a trace of other
    prompts. Trees are verified in full."""
    settings = [parse_sync(text) for text in options.sync.split(",")]
    concurrencies, paces = parse_numbers("concurrency", options.concurrencies), options.paces.split()
    work = {c: [_whole(jobs) for jobs in options.rounds(options.batches * c)] for c in concurrencies}
    rounds = (options.repeats + 1) * options.batches
    progress.total = len(paces) * (2 + len(settings)) * rounds * sum(concurrencies)
    rows = [row for pace in paces for row in _at_pace(pace, options, settings, work, progress)]
    errors = [abs(row["error"]) for row in rows]
    summary = {"settings": len(rows), "median_error": statistics.median(errors), "worst_error": max(errors)}
    return Report({"simulated": rows, "summary": [summary]})


def _whole(jobs: Sequence[Job]) -> list[Job]:
    return [replace(job, params=replace(job.params, ignore_eos=True)) for job in jobs]


def _at_pace(
    pace: str,
    options: BenchOptions,
    settings: Sequence[tuple[int, int, int]],
    work: Mapping[int, Sequence[Sequence[Job]]],
    progress: ProgressBar,
) -> Iterator[Row]:
    config = options.engine_config(mode="async", budget="fixed", pace=pace)
    config = replace(config, max_requests=max(config.max_requests, *work))
    twin = Twin(options, config)
    whole = Speculation(nodes=config.nodes, leaves=config.leaves, wanted=config.wanted, adaptive=False)
    speculations = {OFF: whole, ASYNC: _with(whole, mode="async")} | {
        sync_name(setting): _with(whole, mode="sync", levels=setting[0], width=setting[1], nodes=setting[2])
        for setting in settings
    }
    with Engine(config) as engine:
        players = {OFF: PLAIN} | {sync_name(one): sync_contestant(engine, one) for one in settings}
        players[ASYNC] = contestant_of(engine)
        for concurrency, jobs in work.items():
            real = compete(engine, players, jobs, concurrency, progress)
            for name in players:
                simulated = twin.run(speculations[name], jobs[0], concurrency)
                yield {"pace": pace, "concurrency": concurrency, **_compared(name, real, simulated)}


def _with(speculation: Speculation, **fields: object) -> Speculation:
    return structs.replace(speculation, **fields)


def _compared(name: str, real: Mapping[str, Sequence[Run]], simulated: SimulatedRun) -> Row:
    speed = speed_of(name, real)
    measured = speed["tokens_per_second"].median
    return {
        "setting": name,
        "measured": speed["tokens_per_second"],
        "simulated": simulated.tokens_per_second,
        "error": simulated.tokens_per_second / measured - 1,
        "tokens_per_step": speed["tokens_per_verify_step"],
        "simulated_per_step": simulated.tokens_per_step,
        "overruns": speed["overruns"],
    }


# -- on, off, and the rule


def run_rule(options: BenchOptions, progress: ProgressBar) -> Report:
    """Plain decoding, whole trees, and the adaptive budget at each concurrency, real and simulated: speed-ups of trees,
    where they fall below 1, and what the rule keeps of the better one."""
    config = options.engine_config(mode=options.compared, budget="auto")
    concurrencies = parse_numbers("concurrency", options.concurrencies)
    config = replace(config, max_requests=max(config.max_requests, *concurrencies))
    work = {c: [_whole(jobs) for jobs in options.rounds(options.batches * c)] for c in concurrencies}
    progress.total = 3 * (options.repeats + 1) * options.batches * sum(concurrencies)
    twin = Twin(options, config)
    with Engine(config) as engine:
        rows = [_at_load(engine, twin, jobs, concurrency, progress) for concurrency, jobs in work.items()]
    crossings = {kind: crossover(concurrencies, [row[kind] for row in rows]) for kind in ("measured", "simulated")}
    kept = min(row["rule_over_better"].median for row in rows)
    return Report({"loads": rows, "summary": [{**crossings, "rule_keeps": kept, "holds": kept >= 1 - TOLERANCE}]})


def _at_load(engine: Engine, twin: Twin, jobs: Sequence[Sequence[Job]], concurrency: int, progress: ProgressBar) -> Row:
    config = engine.config
    budget = make_budget(config, engine.worker.executor, engine.drafter)
    assert isinstance(budget, AdaptiveBudget)  # the configuration says so
    trees = Contestant(always(engine.drafter), lambda: FixedBudget(config.nodes, config.levels))
    players = {OFF: PLAIN, ON: trees, RULE: Contestant(always(engine.drafter), WatchedBudget(budget).begin_run)}
    real = compete(engine, players, jobs, concurrency, progress)
    measured = {name: statistics.median(run.tokens_per_second for run in runs) for name, runs in real.items()}
    whole = Speculation(
        mode="sync" if config.mode == "sync" else "async",
        nodes=config.nodes,
        levels=config.levels,
        width=config.width,
        leaves=config.leaves,
    )
    simulated = {
        OFF: twin.run(_with(whole, mode="off"), jobs[0], concurrency).tokens_per_second,
        ON: twin.run(_with(whole, adaptive=False), jobs[0], concurrency).tokens_per_second,
        RULE: twin.run(whole, jobs[0], concurrency).tokens_per_second,
    }
    better = max((OFF, ON), key=lambda name: measured[name])
    return {
        "concurrency": concurrency,
        "off": measured[OFF],
        "measured": measured[ON] / measured[OFF],
        "simulated": simulated[ON] / simulated[OFF],
        "better": better,
        "rule_over_better": over(RULE, better, real),
        "simulated_rule_over_better": simulated[RULE] / max(simulated[OFF], simulated[ON]),
        "overruns": speed_of(ON, real)["overruns"],
    }


def crossover(loads: Sequence[int], speedups: Sequence[float]) -> float | None:
    """The load at which a speed-up falls below 1, on straight lines over its logarithm; None: nowhere among these."""
    for (low, above), (high, below) in pairwise(zip(loads, speedups, strict=True)):
        if above >= 1 > below:
            return float(math.exp(math.log(low) + (above - 1) / (above - below) * math.log(high / low)))
    return None
