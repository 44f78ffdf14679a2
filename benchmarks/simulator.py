"""The simulator beside real runs whose devices are paced: tokens per second of modes, depths, concurrencies, paces.

    pilotfish plan calibrate --to machine.json
    python benchmarks/simulator.py --machine machine.json --acceptance TRACE

TRACE is a file of `pilotfish bench record`, of other prompts.
"""

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from harness import PAIR, Options, compete, run
from msgspec import structs

from pilotfish.cli.bench.contestants import OFF, PLAIN, Contestant, Run, contestant_of, speed_of
from pilotfish.cli.bench.report import ProgressBar, Report, Row
from pilotfish.cli.bench.workload import Job
from pilotfish.config.engine import EngineConfig
from pilotfish.core.scheduling.budget import FixedBudget
from pilotfish.engine.engine import Engine
from pilotfish.errors import ParameterError
from pilotfish.plan.simulation.acceptance import AcceptanceTrace, read_acceptance
from pilotfish.plan.simulation.calibration import read_calibration
from pilotfish.plan.simulation.models import Cost
from pilotfish.plan.simulation.run import SimulatedRun, simulate
from pilotfish.plan.simulation.setup import HostCosts, Setup, Speculation, closed_load

ASYNC = "async"
#: Rounds of a simulation, of which the last counts: real engines play one to warm up, too.
ROUNDS = 2


class Twin:
    """Simulates what a real engine runs."""

    def __init__(self, options: Options, config: EngineConfig) -> None:
        self._trace: AcceptanceTrace = read_acceptance(Path(options.acceptance))
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


def run_simulator(options: Options, progress: ProgressBar) -> Report:
    """Every setting at every concurrency and pace: real rounds in turn, then their simulation, of a trace of other
    prompts. Trees are verified in full."""
    settings = [parse_sync(text) for text in options.sync]
    concurrencies, paces = options.concurrencies, options.paces
    work = {c: [[job.whole for job in jobs] for jobs in options.rounds(options.batches * c)] for c in concurrencies}
    rounds = (options.repeats + 1) * options.batches
    progress.total = len(paces) * (2 + len(settings)) * rounds * sum(concurrencies)
    rows = [row for pace in paces for row in _at_pace(pace, options, settings, work, progress)]
    errors = [abs(row["error"]) for row in rows]
    summary = {"settings": len(rows), "median_error": statistics.median(errors), "worst_error": max(errors)}
    return Report({"simulated": rows, "summary": [summary]})


def _at_pace(
    pace: str,
    options: Options,
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


def parse_sync(text: str) -> tuple[int, int, int]:
    """Levels, width and nodes of a tree as sync grows and verifies it: `LEVELSxWIDTH:NODES`. ParameterError
    otherwise."""
    match = re.fullmatch(r"(\d+)x(\d+):(\d+)", text)
    levels, width, nodes = map(int, match.groups()) if match else (0, 0, 0)
    if not all(0 < number <= 64 for number in (levels, width, nodes)):
        raise ParameterError("sync", text, "LEVELSxWIDTH:NODES, each 1 to 64, as in 4x8:16")
    return levels, width, nodes


def sync_name(setting: tuple[int, int, int]) -> str:
    levels, width, nodes = setting
    return f"sync {levels}x{width}, {nodes} nodes"


def sync_contestant(engine: Engine, setting: tuple[int, int, int]) -> Contestant:
    """Whole trees, in an engine of mode async."""
    levels, width, nodes = setting
    return Contestant(partial(engine.drafters.make_lm, width), partial(FixedBudget, nodes, levels))


if __name__ == "__main__":
    run(
        run_simulator,
        *PAIR,
        "batches",
        "nodes",
        "leaves",
        "repeats",
        "drafter",
        machine="",
        acceptance="",
        concurrencies=[1, 4],
        sync=["2x4:8", "4x4:16"],
        paces=["target=10ms,draft=2.6ms", "target=20ms,draft=2.6ms"],
    )
