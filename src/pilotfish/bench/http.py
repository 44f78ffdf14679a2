"""Cost of HTTP: tokens per second through a server beside the offline engine's, and how long a token takes from the
target to the client's socket; starts of a server."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import uvloop

from pilotfish.bench.client import COMPLETIONS, Answer, Exchange, exchange
from pilotfish.bench.contestants import Run, contestant_of, rates, take_turns
from pilotfish.bench.options import BenchOptions
from pilotfish.bench.programs import Program, cpu_seconds, memory_bytes, start_server
from pilotfish.bench.report import MEBIBYTE, ProgressBar, Report, Row, Spread, equal_share, percentile, ratios
from pilotfish.bench.workload import Job, parse_numbers
from pilotfish.config.engine import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.engine.processes.process import on_cores
from pilotfish.errors import EngineError

#: Share of the offline engine's tokens/s that a paced target keeps through HTTP.
PROMISE = 0.97


def run_http(options: BenchOptions, progress: ProgressBar) -> Report:
    """At each pace a server and an offline engine of one configuration take turns: a warm-up, `repeats` rounds, and one
    of the server's alone whose events tell of the steps."""
    concurrencies = parse_numbers("concurrency", options.concurrencies)
    config = options.engine_config()
    config = replace(config, max_requests=max(*concurrencies, config.max_requests))
    paces = options.paces.split()
    work = {c: options.rounds(options.batches * c) for c in concurrencies}
    progress.total = len(paces) * len(concurrencies) * (2 * (options.repeats + 1) + 1)
    rows = [row for pace in paces for row in _at_pace(pace, config, work, progress)]
    speeds, delays = [speed for speed, _ in rows], [delay for _, delay in rows]
    holds = all(row["ratio"].median >= PROMISE for row in speeds if row["pace"] != "none")
    return Report({"speeds": speeds, "delays": delays, "promise": PROMISE, "holds": holds})


def _at_pace(
    pace: str, config: EngineConfig, work: Mapping[int, Sequence[Sequence[Job]]], progress: ProgressBar
) -> Iterator[tuple[Row, Row]]:
    """Speed and delays by concurrency."""
    paced = replace(config, pace="" if pace == "none" else pace)
    with start_server(paced) as server, Engine(paced) as engine:
        assert server.told["url"]  # waits
        for concurrency, jobs in work.items():
            contestants: dict[str, Callable[[Sequence[Job]], Any]] = {
                "http": partial(serve_round, server, concurrency),
                "offline": partial(run_offline, engine, concurrency),
            }
            where: Row = {"pace": pace, "concurrency": concurrency}
            rounds = take_turns(contestants, jobs, done=partial(_report, progress, where))
            delays = delays_of(read_all(fetch(server, concurrency, jobs[0], speculation={"detail": True})))
            progress("delays")
            yield {**where, **served_speed(rounds["http"], rounds["offline"])}, {**where, **delays}


def _report(progress: ProgressBar, where: Row, name: str) -> None:
    progress(f"{name}, pace {where['pace']}, {where['concurrency']} at a time")


@dataclass(frozen=True)
class Served:
    """A round through HTTP."""

    seconds: float
    tokens: int
    texts: list[str]  # of each job
    cpu: dict[str, float]  # seconds by process

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def served_speed(http: Sequence[Served], offline: Sequence[Run]) -> Row:
    """Figures of both contestants over rounds. CPU is seconds of it a second, 1 for a whole core, while the server
    served."""
    seconds = sum(run.seconds for run in http)
    return {
        "offline": Spread.of(rates(offline)),
        "http": Spread.of(rates(http)),
        "ratio": ratios(rates(http), rates(offline)),
        "equal_outputs": equal_share([t for run in http for t in run.texts], [t for run in offline for t in run.texts]),
        "cpu": {name: sum(run.cpu[name] for run in http) / seconds for name in http[0].cpu},
    }


def delays_of(answers: Sequence[Answer]) -> Row:
    """Milliseconds from the moment a step's tokens are known to the client's socket having them, a whole event at a
    time."""
    events = [event for answer in answers for event in answer.events if "pilotfish" in event.data]
    waits = [1000 * (event.at - event.data["pilotfish"]["steps"][-1]["verified"]) for event in events]
    return {"events": len(waits), "median": statistics.median(waits), "p99": percentile(waits, 0.99)}


def asked_of(job: Job) -> dict[str, Any]:
    """Parameters of a request, which generates all its tokens: the end of sequence is ignored."""
    return {name: getattr(job.params, name) for name in ("temperature", "max_tokens", "seed")} | {"ignore_eos": True}


def run_offline(engine: Engine, concurrency: int, jobs: Sequence[Job]) -> Run:
    """What a request does not ask for is as the model's generation_config.json says, here as in the server."""
    jobs = [replace(job, params=engine.sampling_params(**asked_of(job))) for job in jobs]
    return contestant_of(engine).run(engine, jobs, concurrency)


def serve_round(server: Program, concurrency: int, jobs: Sequence[Job]) -> Served:
    processes = server.processes()
    before = {name: cpu_seconds(pid) for name, pid in processes.items()}
    client = time.process_time()
    exchanges = fetch(server, concurrency, jobs)
    cpu = {name: cpu_seconds(pid) - before[name] for name, pid in processes.items()}
    cpu["client"] = time.process_time() - client
    return served(read_all(exchanges), cpu)


def served(answers: Sequence[Answer], cpu: dict[str, float]) -> Served:
    seconds = max(answer.closed for answer in answers) - min(answer.sent for answer in answers)
    texts = ["".join(c["text"] for e in answer.events for c in e.data["choices"]) for answer in answers]
    return Served(seconds, sum(answer.tokens for answer in answers), texts, cpu)


def fetch(server: Program, concurrency: int, jobs: Sequence[Job], **fields: Any) -> list[Exchange]:
    """As `fetch_from`, on the server's cores: an engine here may be pinned."""
    with on_cores(frozenset(os.sched_getaffinity(server.pid))):
        return fetch_from(server.told["url"], concurrency, jobs, **fields)


def fetch_from(url: str, concurrency: int, jobs: Sequence[Job], **fields: Any) -> list[Exchange]:
    """Streamed completions, `fields` in the body of each."""
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    bodies = [{"prompt": job.prompt.text, **asked_of(job), **fields} for job in jobs]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_all(url, bodies, concurrency))


def read_all(exchanges: Sequence[Exchange]) -> list[Answer]:
    """EngineError where one did not end well."""
    answers = [Answer(one.parts, one.sent, one.closed) for one in exchanges]
    if broken := [answer for answer in answers if answer.status != 200 or not answer.ended]:
        raise EngineError(f"server: {len(broken)} of {len(answers)} requests did not end well: {broken[0].events[-1:]}")
    return answers


async def _all(url: str, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[Exchange]:
    """Sends so many bodies at a time, in their order."""
    turn = asyncio.Semaphore(concurrency)

    async def one(body: dict[str, Any]) -> Exchange:
        async with turn:
            return await exchange(url, COMPLETIONS, body)

    return await asyncio.gather(*map(one, bodies))


# -- starts


def run_start(options: BenchOptions, progress: ProgressBar) -> Report:
    """Seconds of each start until requests can be served, and the resident memory of each process then; pages that
    processes share count in each."""
    seconds: list[float] = []
    resident: dict[str, list[int]] = {}
    config = options.engine_config(drafter=EngineConfig.drafter)
    progress.total = options.repeats
    for _ in range(options.repeats):
        began = time.perf_counter()
        with start_server(config) as server:
            assert server.told["url"]  # waits
            seconds.append(time.perf_counter() - began)
            for role, pid in server.processes().items():
                resident.setdefault(role, []).append(memory_bytes(pid))
        progress("starts")
    mebibytes = {role: statistics.median(sizes) / MEBIBYTE for role, sizes in resident.items()}
    return Report({"seconds_until_ready": Spread.of(seconds), "seconds": seconds, "resident_mib": mebibytes})
