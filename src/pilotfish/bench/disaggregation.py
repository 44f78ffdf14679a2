"""Prompts that arrive among sequences that decode: on two devices that do both, and on one that decodes beside one that
computes prompts for it."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from pathlib import Path

import msgspec
from msgspec.structs import replace as changed

from pilotfish.bench.contestants import take_turns
from pilotfish.bench.offered_loads import (
    ArrivingPrompt,
    LoadedRun,
    OfferedLoad,
    TokenRing,
    joined_runs,
    poisson_times,
    split_load,
    tokens_of,
)
from pilotfish.bench.options import BenchOptions
from pilotfish.bench.programs import Program, start_proxy
from pilotfish.bench.proxy import HOST
from pilotfish.bench.report import ProgressBar, Report, Row, equal_share, percentile
from pilotfish.bench.workload import parse_numbers
from pilotfish.config.engine import EngineConfig
from pilotfish.config.text import config_text
from pilotfish.core.prefilling.handover import WHOLE, HandOverReport
from pilotfish.engine.processes.process import WorkerSpec
from pilotfish.model.loading.metadata import load_tokenizer
from pilotfish.workers.records import part_of

#: Of each layout.
DEVICES = 2
UNDISTURBED, ALL_HANDED, AUTO = "undisturbed", "all handed over", "auto"
#: Milliseconds there and back, of networks between target and pool.
ROUND_TRIP = 0.5
#: Tokens of a stream's prompt.
STREAM_PROMPT = 100
#: By how much arriving prompts may lengthen the times between tokens, and handing over those to first tokens.
GAP_PROMISE, FIRST_TOKEN_PROMISE = 1.2, 1.1

#: Of a prefill pool, as its engine has them.
POOL_OPTIONS = ("target", "dtype", "kv_slots", "pace", "max_rows")
#: Puts a layout under a load.
Layout = Callable[[OfferedLoad], LoadedRun]


@dataclass(frozen=True)
class LoadCell:
    """Prompts of so many tokens arrive, so many tokens a second together."""

    prompt_tokens: int
    arriving_per_second: int


@dataclass(frozen=True)
class PacedForward:
    """Of a prefill worker."""

    began: float  # a moment of the host's clock
    taken: float  # of its pace, by itself


def run_disaggregation(options: BenchOptions, progress: ProgressBar) -> Report:
    """In each cell the contestants take turns with `repeats` loads."""
    lengths, speeds = parse_numbers("lengths", options.lengths), parse_numbers("arriving", options.arriving)
    rows = parse_numbers("step_rows", options.step_rows)
    cells = [LoadCell(length, speed) for length, speed in product(lengths, speeds)]
    config = replace(options.engine_config(mode="off", prefix_cache=True), draft=None)
    ring = tokens_of(options.rows(), load_tokenizer(config.target))
    with tempfile.TemporaryDirectory() as directory:
        timeline = Path(directory, "timeline.json")
        with ExitStack() as stack:
            layouts = layouts_of(config, options, rows, timeline, stack)
            progress.total = len(cells) * len(layouts) * options.repeats
            runs = {cell: take_turns(layouts, _loads(cell, ring, rows[0], options), 0, progress) for cell in cells}
        forwards = forwards_of(timeline)
    found = [row for cell, rounds in runs.items() for row in cell_rows(cell, rounds, forwards)]
    return Report({"cells": found, "gap_promise": GAP_PROMISE, "first_token_promise": FIRST_TOKEN_PROMISE})


# -- layouts


def layouts_of(
    config: EngineConfig, options: BenchOptions, rows: Sequence[int], timeline: Path, stack: ExitStack
) -> dict[str, Layout]:
    """By name; their processes start here, one a device, and end with `stack`. The prefill pool writes `timeline`."""
    cores = sorted(os.sched_getaffinity(0))
    places = [frozenset({cores[device % len(cores)]}) for device in range(DEVICES)]
    largest = replace(config, max_rows=max(rows))
    alike = [stack.enter_context(start_engine(largest, place)) for place in places]
    pool = start_prefill_pool(replace(config, max_rows=options.prefill_rows), f"tcp://{HOST}:0", places[1], timeline)
    links = [] if options.links == "" else parse_numbers("links", options.links)
    distances = _distances(config, stack.enter_context(pool), links, stack)
    apart = {
        name + distance: stack.enter_context(start_engine(replace(own, prefill_threshold=threshold), places[0]))
        for distance, own in distances.items()
        for name, threshold in ((ALL_HANDED, "1"), (AUTO, "auto"))
    }
    for program in (*alike, *apart.values()):
        assert program.told == {}  # waits: nothing loads while others are measured
    found: dict[str, Layout] = {UNDISTURBED: lambda load: run_under(alike[:1], changed(load, arrivals=[]))}
    found |= {combined(number): partial(_run_combined, alike, number) for number in rows}
    found |= {name: partial(run_under, [program]) for name, program in apart.items()}
    return {name: partial(_run_apart, name, layout) for name, layout in found.items()}


def _distances(config: EngineConfig, pool: Program, links: Sequence[int], stack: ExitStack) -> dict[str, EngineConfig]:
    """Of engines that use a pool on their host, then over networks of so many Mbit/s."""
    found = {"": replace(config, prefill_pool=(pool.told["endpoint"],))}
    for mbit in links:
        proxy = stack.enter_context(start_proxy(pool, ROUND_TRIP, mbit))
        found[f", {mbit} Mbit/s"] = replace(config, prefill_pool=(proxy.told["endpoint"],), prefill_transports=())
    return found


def combined(rows: int) -> str:
    return f"combined, {rows} rows"


def start_engine(config: EngineConfig, cores: frozenset[int]) -> Program:
    """An engine that answers loads."""
    command = [sys.executable, "-m", "pilotfish.bench.loaded", config_text(config)]
    return Program(WorkerSpec("engine under load", command, cores), stdin=subprocess.PIPE)


def start_prefill_pool(config: EngineConfig, listen: str, cores: frozenset[int], timeline: Path) -> Program:
    """One that runs the target of `config`, loading; `told["endpoint"]` once it serves."""
    given = {name: getattr(config, name) for name in POOL_OPTIONS} | {"listen": listen, "trace": timeline}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    command = [sys.executable, "-m", "pilotfish", "prefill", "--json", *options]
    return Program(WorkerSpec("prefill pool", command, cores), signal.SIGTERM)


def _run_apart(name: str, layout: Layout, load: OfferedLoad) -> LoadedRun:
    """What others have computed of the same load is not found."""
    return layout(changed(load, salt=f"{name}: {load.salt}"))


def _run_combined(engines: Sequence[Program], rows: int, load: OfferedLoad) -> LoadedRun:
    return run_under(engines, changed(load, rows=rows))


def run_under(engines: Sequence[Program], load: OfferedLoad) -> LoadedRun:
    """All engines at once, each with its share of the load."""
    with ThreadPoolExecutor(len(engines)) as threads:
        asked = [msgspec.to_builtins(part) for part in split_load(load, len(engines))]
        answers = threads.map(lambda engine, load: engine.ask(**load), engines, asked)
        return joined_runs([msgspec.convert(answer, LoadedRun) for answer in answers])


# -- loads


def _loads(cell: LoadCell, ring: Sequence[int], rows: int, options: BenchOptions) -> Iterator[OfferedLoad]:
    """One for each round, the same for all layouts."""
    rate = cell.arriving_per_second / cell.prompt_tokens
    for turn in range(options.repeats):
        tokens = TokenRing(ring, seed=turn)
        streams = [tokens.cut(STREAM_PROMPT) for _ in range(options.streams)]
        times = poisson_times(rate, options.seconds, seed=turn)
        arrivals = [ArrivingPrompt(at, tokens.cut(cell.prompt_tokens)) for at in times]
        salt = f"{cell.prompt_tokens} {cell.arriving_per_second} {turn}"
        yield OfferedLoad(streams, arrivals, options.seconds, options.max_tokens, rows, salt)


# -- figures


def cell_rows(
    cell: LoadCell, rounds: Mapping[str, Sequence[LoadedRun]], forwards: Sequence[PacedForward]
) -> Iterator[Row]:
    """Of all rounds together. Gaps are those between a stream's tokens, over those of the undisturbed; times to first
    tokens are over those of the first combined layout. `handed` is the share of the arrivals whose KV was handed over
    whole, `exposed_ms` what that took on top of waiting and computing, `overruns` the larger share of both roles'."""
    gaps = {name: _pooled(run.gaps for run in runs) for name, runs in rounds.items()}
    firsts = {name: _pooled(run.first_tokens for run in runs) for name, runs in rounds.items()}
    base = next(name for name in rounds if name != UNDISTURBED)
    outputs = {name: [tokens for run in runs for tokens in run.outputs] for name, runs in rounds.items()}
    for name, runs in rounds.items():
        row: Row = {**vars(cell), "layout": name, "prompts": len(firsts[name])}
        row |= _percentiles("gap", gaps[name]) | {"over_undisturbed": _over(gaps[name], gaps[UNDISTURBED], 0.99)}
        if firsts[name]:
            row |= _percentiles("first_token", firsts[name])
            row |= {f"p{p}_over_combined": _over(firsts[name], firsts[base], p / 100) for p in (50, 99)}
            row |= handed_over([report for run in runs for report in run.handovers], len(firsts[name]))
            row["equal_outputs"] = equal_share(outputs[name], outputs[base])
        row["tokens_per_second"] = sum(run.tokens for run in runs) / sum(run.seconds for run in runs)
        yield row | {"overruns": max(_target_overruns(runs), _prefill_overruns(runs, forwards))}


def _pooled(parts: Iterable[Sequence[float]]) -> list[float]:
    return list(chain.from_iterable(parts))


def _percentiles(name: str, values: Sequence[float]) -> Row:
    return {f"{name}_p{p}_ms": percentile(values, p / 100) for p in (50, 99)}


def _over(values: Sequence[float], others: Sequence[float], share: float) -> float:
    return percentile(values, share) / percentile(others, share)


def handed_over(reports: Sequence[HandOverReport], prompts: int) -> Row:
    whole = [report for report in reports if report.outcome == WHOLE]
    if not whole:
        return {"handed": 0.0}
    exposed, transport = statistics.median(1000 * one.exposed for one in whole), whole[0].transport
    return {"handed": len(whole) / prompts, "transport": transport, "exposed_ms": exposed}


def _target_overruns(runs: Sequence[LoadedRun]) -> float:
    return sum(run.overruns for run in runs) / max(sum(run.forwards for run in runs), 1)


def _prefill_overruns(runs: Sequence[LoadedRun], forwards: Sequence[PacedForward]) -> float:
    """Of the forwards that a prefill worker began while these ran."""
    return overrun_share([one for one in forwards if any(0 <= one.began - run.began < run.seconds for run in runs)])


def overrun_share(forwards: Sequence[PacedForward]) -> float:
    return statistics.mean(one.taken > 1 for one in forwards) if forwards else 0.0


def forwards_of(timeline: Path) -> list[PacedForward]:
    """Those of a prefill worker that were paced."""
    events = [msgspec.json.decode(line) for line in part_of(timeline, "prefill").read_bytes().splitlines()]
    paced = [event for event in events if event["name"] == "prefill" and "taken" in event["args"]]
    return [PacedForward(event["ts"] / 1e6, event["args"]["taken"]) for event in paced]
