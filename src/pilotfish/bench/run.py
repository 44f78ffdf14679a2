"""Modes of speculation by concurrency and by settings of the draft, off among them, on the same prompts and seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import msgspec

from pilotfish.bench.contestants import OFF, OutputTimes, Run, joined, speed_of
from pilotfish.bench.engines import Engines
from pilotfish.bench.levels import Level, levels_of
from pilotfish.bench.options import BenchOptions
from pilotfish.bench.report import ProgressBar, Report, Row, percentile
from pilotfish.bench.saved import DepthCounts, DrawnLevel, DrawnStep, MeasuredAcceptance, RequestTimes, TimelineWindow
from pilotfish.bench.settings import grid_of
from pilotfish.bench.workload import Job, parse_numbers
from pilotfish.engine.memory import precision_here
from pilotfish.model.pacer import MAX_OVERRUN_SHARE
from pilotfish.workers.records import StepRecord

#: Tables that are only in the JSON.
UNSHOWN = ("requests", "acceptance", "windows")
#: Of a run of off; the steps of the others that begin in the same time are in their windows.
WINDOW_STEPS = 12

#: Of the shortest run, what a window takes at most.
WINDOW_SHARE = 0.6

#: Levels by setting.
Levels = Mapping[str, Sequence[Level]]
#: Measured rounds of each setting, by concurrency.
Rounds = Mapping[int, Mapping[str, Sequence[Run]]]


def run_modes(options: BenchOptions, progress: ProgressBar) -> Report:
    """Every setting plays every round, in rotating order, `repeats` rounds after one to warm up; fails where outputs of
    float32 differ from those of off."""
    settings, prompts = grid_of(options), len(options.rows())
    numbers = {c: max(c, prompts) for c in parse_numbers("concurrency", options.concurrencies)}
    jobs = {concurrency: options.rounds(number) for concurrency, number in numbers.items()}
    progress.total = len(settings) * (options.repeats + 1) * sum(numbers.values())
    with Engines(options.engine_config(max_requests=max(32, *numbers)), options.engines) as engines:
        rounds = {c: engines.play(settings, jobs[c], c, progress) for c in numbers}
    measured = [row for c, found in rounds.items() for row in measured_rows(found, c, engines.levels)]
    config = options.engine_config()
    exact = precision_here(config, config.target).name == "float32"
    unequal = [row["setting"] for row in measured if row["equal_outputs"] < 1]
    results = {
        "grid": [setting.row() for setting in settings],
        "settings": measured,
        "latencies": [row for c, found in rounds.items() for row in latency_rows(found, c)],
        "invalid": invalid(measured),
        **drawn(rounds, {c: rest for c, (_, *rest) in jobs.items()}, engines.levels),
    }
    return Report(results, failed=exact and bool(unequal), unshown=UNSHOWN)


def measured_rows(rounds: Mapping[str, Sequence[Run]], concurrency: int, levels: Levels) -> list[Row]:
    """A row for each setting. `overruns` are the largest share of a paced model's forwards, drafts' levels included."""
    rows = list[Row]()
    for name, runs in rounds.items():
        speed = speed_of(name, rounds)
        during = [level for run in runs for level in levels_during(run, levels[name])]
        late = sum(level.taken > 1 for level in during) / len(during) if during else 0.0
        named = {"setting": speed.pop("contestant"), "concurrency": concurrency}
        rows.append({**named, **speed, "overruns": max(speed["overruns"], late), **levels_of(runs, levels[name])})
    return rows


def levels_during(run: Run, levels: Sequence[Level]) -> list[Level]:
    return [level for level in levels if run.steps and run.steps[0].began <= level.began <= run.steps[-1].ended]


def invalid(measured: Sequence[Row]) -> str:
    """Why a paced run says nothing of the devices that it emulates; empty where it does."""
    late = [row for row in measured if row["overruns"] > MAX_OVERRUN_SHARE]
    if not late:
        return ""
    worst = max(late, key=lambda row: row["overruns"])
    where = f"{worst['setting']}, {worst['concurrency']} at a time"
    return (
        f"{worst['overruns']:.1%} of the forwards of {where} took longer than their pace; {MAX_OVERRUN_SHARE:.0%} may"
    )


def latency_rows(rounds: Mapping[str, Sequence[Run]], concurrency: int) -> list[Row]:
    """Milliseconds at p50, p90, p95 and p99: to the first token, between moments at which tokens come, and in all."""
    return [
        {"setting": name, "concurrency": concurrency, **_percentiles([t for run in runs for t in run.times])}
        for name, runs in rounds.items()
    ]


def _percentiles(outputs: Sequence[OutputTimes]) -> Row:
    values = {
        "ttft_ms": [one.times[0] - one.began for one in outputs],
        "itl_ms": [b - a for one in outputs for a, b in _gaps(one.times)],
        "e2e_ms": [one.times[-1] - one.began for one in outputs],
    }
    return {
        f"{name} p{share:.0%}".rstrip("%"): 1000 * percentile(found, share)
        for name, found in values.items()
        for share in (0.5, 0.9, 0.95, 0.99)
        if found
    }


def _gaps(times: Sequence[float]) -> Iterable[tuple[float, float]]:
    return ((a, b) for a, b in pairwise(times) if b > a)


# -- what a page draws


def drawn(rounds: Rounds, jobs: Mapping[int, Sequence[Sequence[Job]]], levels: Levels) -> dict[str, Any]:
    """Requests, acceptance by depth, and a window of each setting's last round, as JSON's rows."""
    players = [(name, c, runs) for c, found in rounds.items() for name, runs in found.items()]
    requests = chain.from_iterable(request_rows(name, c, runs, jobs[c]) for name, c, runs in players)
    acceptance = [acceptance_of(name, c, runs) for name, c, runs in players]
    spans = {c: window_seconds({name: runs[-1] for name, runs in found.items()}) for c, found in rounds.items()}
    windows = [window(name, c, runs[-1], levels[name], spans[c]) for name, c, runs in players]
    tables = {"requests": list(requests), "acceptance": acceptance, "windows": windows}
    return {name: msgspec.to_builtins(table) for name, table in tables.items()}


def request_rows(
    setting: str, concurrency: int, runs: Sequence[Run], rounds: Sequence[Sequence[Job]]
) -> list[RequestTimes]:
    """An offline request is sent when it is begun: all of a round are there from its beginning."""
    rows = []
    for number, (run, jobs) in enumerate(zip(runs, rounds, strict=True)):
        start = min(one.began for one in run.times)
        for one, job in zip(run.times, jobs, strict=True):
            times = [round(at - start, 6) for at in one.times]
            rows.append(
                RequestTimes(
                    setting=setting,
                    concurrency=concurrency,
                    round=number,
                    category=job.prompt.category,
                    sent=round(one.began - start, 6),
                    first=times[0],
                    ended=times[-1],
                    times=times,
                )
            )
    return rows


def acceptance_of(setting: str, concurrency: int, runs: Sequence[Run]) -> MeasuredAcceptance:
    run = joined(runs)
    counts = DepthCounts(run.by_depth("offered_by_depth"), run.by_depth("accepted_by_depth"))
    return MeasuredAcceptance(setting=setting, concurrency=concurrency, by_depth=counts)


def window_seconds(runs: Mapping[str, Run]) -> float:
    """So long that each of the runs is in its middle all the while."""
    shortest = min(_seconds(run) for run in runs.values())
    return min(WINDOW_STEPS * _seconds(runs[OFF]) / len(runs[OFF].steps), WINDOW_SHARE * shortest)


def _seconds(run: Run) -> float:
    return run.steps[-1].ended - run.steps[0].began


def window(setting: str, concurrency: int, run: Run, levels: Sequence[Level], seconds: float) -> TimelineWindow:
    """The steps that begin within so many seconds in the middle of a run, and the levels of its draft meanwhile."""
    middle = run.steps[0].began + (_seconds(run) - seconds) / 2
    start = next(step.began for step in run.steps if step.began >= middle)
    steps = [step for step in run.steps if start <= step.began < start + seconds]
    during = [one for one in levels if start < one.ended and one.began < steps[-1].ended]
    return TimelineWindow(
        setting,
        concurrency,
        [_drawn_step(step, start) for step in steps],
        [DrawnLevel(round(one.began - start, 6), round(one.ended - start, 6), one.leaves) for one in during],
    )


def _drawn_step(step: StepRecord, start: float) -> DrawnStep:
    began, planned, drafted, forward, ended = (
        round(at - start, 6) for at in (step.began, step.planned, step.drafted, step.prepared, step.ended)
    )
    return DrawnStep(
        *(began, planned, drafted, forward, ended),
        *(step.sequences, step.nodes, step.depth, step.offered, step.accepted, step.committed, step.hits),
    )
