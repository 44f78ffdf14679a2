"""Modes of speculation by concurrency and by settings of the draft, off among them, on the same prompts and seeds."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise

from pilotfish.cli.bench.contestants import OutputTimes, Run, joined, speed_of
from pilotfish.cli.bench.modes.engines import Engines, Level, levels_during, levels_of
from pilotfish.cli.bench.modes.settings import grid_of
from pilotfish.cli.bench.options import BenchOptions
from pilotfish.cli.bench.report import ProgressBar, Report, Row
from pilotfish.cli.bench.serving.figures import spread_of
from pilotfish.cli.bench.workload import Job, parse_numbers
from pilotfish.model.pacer import MAX_OVERRUN_SHARE

#: Tables that are only in the JSON.
UNSHOWN = ("requests", "acceptance")
#: Levels by setting.
Levels = Mapping[str, Sequence[Level]]
#: Measured rounds of each setting, by concurrency.
Rounds = Mapping[int, Mapping[str, Sequence[Run]]]


def run_modes(options: BenchOptions, progress: ProgressBar) -> Report:
    """Settings take turns, `repeats` rounds after a warm-up; fails where float32 outputs differ from those of off."""
    settings, prompts = grid_of(options), len(options.rows())
    numbers = {c: max(c, prompts) for c in parse_numbers("concurrency", options.concurrencies)}
    jobs = {concurrency: options.rounds(number) for concurrency, number in numbers.items()}
    progress.total = len(settings) * (options.repeats + 1) * sum(numbers.values())
    with Engines(options.engine_config(max_requests=max(32, *numbers)), options.engines) as engines:
        rounds = {c: engines.play(settings, jobs[c], c, progress) for c in numbers}
    measured = [row for c, found in rounds.items() for row in measured_rows(found, c, engines.levels)]
    unequal = [row["setting"] for row in measured if row["equal_outputs"] < 1]
    results = {
        "grid": [setting.row() for setting in settings],
        "settings": measured,
        "latencies": [row for c, found in rounds.items() for row in latency_rows(found, c)],
        "invalid": invalid(measured),
        **by_request(rounds, {c: rest for c, (_, *rest) in jobs.items()}),
    }
    return Report(results, failed=options.precision == "float32" and bool(unequal), unshown=UNSHOWN)


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


def invalid(measured: Sequence[Row]) -> str:
    """Why a paced run says nothing of the devices that it emulates; empty where it does."""
    late = [row for row in measured if row["overruns"] > MAX_OVERRUN_SHARE]
    if not late:
        return ""
    worst = max(late, key=lambda row: row["overruns"])
    share, where = worst["overruns"], f"{worst['setting']}, {worst['concurrency']} at a time"
    return f"{share:.1%} of the forwards of {where} took longer than their pace; {MAX_OVERRUN_SHARE:.0%} may"


def latency_rows(rounds: Mapping[str, Sequence[Run]], concurrency: int) -> list[Row]:
    """Milliseconds to the first token, between moments at which tokens come, and in all."""
    return [
        {"setting": name, "concurrency": concurrency, "ms": kind, **spread_of(seconds)}
        for name, runs in rounds.items()
        for kind, seconds in _latencies([one for run in runs for one in run.times]).items()
    ]


def _latencies(outputs: Sequence[OutputTimes]) -> dict[str, list[float]]:
    return {
        "TTFT": [one.times[0] - one.began for one in outputs],
        "ITL": [b - a for one in outputs for a, b in pairwise(one.times) if b > a],
        "E2E": [one.times[-1] - one.began for one in outputs],
    }


def by_request(rounds: Rounds, jobs: Mapping[int, Sequence[Sequence[Job]]]) -> dict[str, list[Row]]:
    players = [(name, c, runs) for c, found in rounds.items() for name, runs in found.items()]
    requests = chain.from_iterable(request_rows(name, c, runs, jobs[c]) for name, c, runs in players)
    return {"requests": list(requests), "acceptance": [acceptance_of(*player) for player in players]}


def request_rows(setting: str, concurrency: int, runs: Sequence[Run], rounds: Sequence[Sequence[Job]]) -> Iterator[Row]:
    """Seconds from a round's beginning, when all of its requests are there; one is sent when it is begun. Tokens that
    came together have one time."""
    for number, (run, jobs) in enumerate(zip(runs, rounds, strict=True)):
        start = min(one.began for one in run.times)
        for one, job in zip(run.times, jobs, strict=True):
            times = [round(at - start, 6) for at in one.times]
            yield {
                "setting": setting,
                "concurrency": concurrency,
                "round": number,
                "category": job.prompt.category,
                "sent": round(one.began - start, 6),
                "first": times[0],
                "ended": times[-1],
                "times": times,
            }


def acceptance_of(setting: str, concurrency: int, runs: Sequence[Run]) -> Row:
    """How many trees reached a depth, and how many had a guess accepted there. Depth d is at index d - 1."""
    run = joined(runs)
    by_depth = {"offered": run.by_depth("offered_by_depth"), "accepted": run.by_depth("accepted_by_depth")}
    return {"setting": setting, "concurrency": concurrency, "by_depth": by_depth}
