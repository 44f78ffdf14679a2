"""What HTTP costs: tokens per second through a server beside the offline engine's, and how long a token takes from the
target to the client's socket. And what it costs to start a server."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import uvloop

from pilotfish.bench.client import Answer, Unread, exchange, read
from pilotfish.bench.contestants import rates, take_turns
from pilotfish.bench.machine import MEBIBYTE
from pilotfish.bench.options import BenchOptions
from pilotfish.bench.programs import (
    Program,
    Round,
    RoundResult,
    Task,
    cpu_seconds,
    memory_bytes,
    run_offline,
    start_offline,
    start_server,
)
from pilotfish.bench.report import Progress, Report, Row, Spread, equal_share, percentile, ratios
from pilotfish.bench.workload import Job, parse_numbers
from pilotfish.errors import EngineError

#: Share of the offline engine's tokens/s that a paced target keeps through HTTP.
PROMISE = 0.97
COMPLETIONS = "/v1/completions"


def run_http(options: BenchOptions, progress: Progress) -> Report:
    """At each pace a server and an offline engine of one configuration take turns: a warm-up, `repeats` rounds, and one
    of the server's alone whose events tell of the steps."""
    concurrencies = parse_numbers("concurrency", options.concurrencies)
    config = options.engine_config()
    config = replace(config, max_requests=max(*concurrencies, config.max_requests))
    paces = ["" if pace == "none" else pace for pace in options.paces.split()]
    workload, turns = options.workload(), options.repeats + 1
    progress.total = len(paces) * len(concurrencies) * (2 * turns + 1)
    speeds, delays = list[Row](), list[Row]()
    for pace in paces:
        paced = replace(config, pace=pace)
        with start_server(paced) as server, start_offline(paced) as offline:
            assert offline.told is not None  # waits
            contestants = {"http": partial(serve_round, server), "offline": partial(run_offline, offline)}
            for concurrency in concurrencies:
                where: Row = {"pace": pace or "none", "concurrency": concurrency}
                jobs = [workload.jobs(options.batches * concurrency, turn) for turn in range(turns)]
                work = [round_of(one, concurrency) for one in jobs]
                rounds = take_turns(contestants, work, done=partial(_report, progress, where))
                speeds.append({**where, **served_speed(rounds)})
                delays.append({**where, **delays_of(serve(server, work[0], speculation={"detail": True}))})
                progress("delays")
    holds = all(row["http_over_offline"].median >= PROMISE for row in speeds if row["pace"] != "none")
    return Report({"speeds": speeds, "delays": delays, "promise": PROMISE, "holds": holds})


def _report(progress: Progress, where: Row, name: str) -> None:
    progress(f"{name}, pace {where['pace']}, {where['concurrency']} at a time")


def round_of(jobs: Sequence[Job], concurrency: int) -> Round:
    """Each job to its last token: the end of sequence is ignored."""
    tasks = []
    for job in jobs:
        params = {name: getattr(job.params, name) for name in ("temperature", "max_tokens", "seed")}
        tasks.append(Task(job.prompt.text, {**params, "ignore_eos": True}))
    return Round(tasks, concurrency)


def served_speed(rounds: Mapping[str, Sequence[RoundResult]]) -> Row:
    """Both contestants over rounds. CPU is seconds of it a second, 1 for a whole core, while the server served."""
    http, offline = rounds["http"], rounds["offline"]
    seconds = sum(run.seconds for run in http)
    return {
        "offline": Spread.of(rates(offline)),
        "http": Spread.of(rates(http)),
        "http_over_offline": ratios(rates(http), rates(offline)),
        "equal_outputs": equal_share([t for run in http for t in run.texts], [t for run in offline for t in run.texts]),
        "cpu": {name: sum(run.cpu[name] for run in http) / seconds for name in http[0].cpu},
    }


def delays_of(answers: Sequence[Answer]) -> Row:
    """Milliseconds from the moment a step's tokens are known to the client's socket having them, a whole event at a
    time."""
    events = [event for answer in answers for event in answer.events if "pilotfish" in event.data]
    waits = [1000 * (event.at - event.data["pilotfish"]["steps"][-1]["verified"]) for event in events]
    return {"events": len(waits), "median": statistics.median(waits), "p99": percentile(waits, 0.99)}


def serve_round(server: Program, work: Round) -> RoundResult:
    """A round through HTTP."""
    processes = server.processes()
    before = {name: cpu_seconds(pid) for name, pid in processes.items()}
    client = time.process_time()
    answers = serve(server, work)
    cpu = {name: cpu_seconds(pid) - before[name] for name, pid in processes.items()}
    cpu["client"] = time.process_time() - client
    return result_of(answers, cpu)


def result_of(answers: Sequence[Answer], cpu: dict[str, float]) -> RoundResult:
    seconds = max(answer.closed for answer in answers) - min(answer.sent for answer in answers)
    texts = ["".join(c["text"] for e in answer.events for c in e.data["choices"]) for answer in answers]
    return RoundResult(seconds, sum(answer.tokens for answer in answers), texts, cpu)


def serve(server: Program, work: Round, **fields: Any) -> list[Answer]:
    """Streamed completions, `fields` in the body of each; EngineError where one does not end well."""
    bodies = [
        {"prompt": t.prompt, **t.params, **fields, "stream": True, "stream_options": {"include_usage": True}}
        for t in work.tasks
    ]
    with closing(asyncio.Runner(loop_factory=uvloop.new_event_loop)) as runner:
        unread = runner.run(_all(server.told["url"], bodies, work.concurrency))
    answers = [read(one) for one in unread]
    if broken := [answer for answer in answers if answer.status != 200 or not answer.ended]:
        raise EngineError(f"server: {len(broken)} of {len(answers)} requests did not end well: {broken[0].events[-1:]}")
    return answers


async def _all(url: str, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[Unread]:
    """So many at a time, in their order."""
    answers: dict[int, Unread] = {}
    waiting = iter(enumerate(bodies))

    async def client() -> None:
        for index, body in waiting:
            answers[index] = await exchange(url, COMPLETIONS, body)

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return [answers[index] for index in range(len(bodies))]


# -- starts


def run_start(options: BenchOptions, progress: Progress) -> Report:
    """Seconds of each start until requests can be served, and the resident memory of each process then; pages that
    processes share count in each."""
    seconds: list[float] = []
    resident: dict[str, list[int]] = {}
    progress.total = options.repeats
    for _ in range(options.repeats):
        began = time.perf_counter()
        with start_server(options.engine_config()) as server:
            assert server.told["url"]  # waits
            seconds.append(time.perf_counter() - began)
            for role, pid in server.processes().items():
                resident.setdefault(role, []).append(memory_bytes(pid))
        progress("starts")
    mebibytes = {role: statistics.median(sizes) / MEBIBYTE for role, sizes in resident.items()}
    return Report({"seconds_until_ready": Spread.of(seconds), "seconds": seconds, "resident_mib": mebibytes})
