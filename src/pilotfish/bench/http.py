"""Cost of HTTP: tokens per second through a server beside the offline engine's, and how long a token takes from the
target to the client's socket; starts of a server.

The HTTP client is lean: it shares its cores with the server that it measures, so while an answer comes in it only notes
what came when, and reads that once the answer is over."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop

from pilotfish.bench.contestants import rates, take_turns
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
from pilotfish.bench.report import MEBIBYTE, ProgressBar, Report, Row, Spread, equal_share, percentile, ratios
from pilotfish.bench.workload import Job, parse_numbers
from pilotfish.config import EngineConfig
from pilotfish.errors import EngineError

#: Share of the offline engine's tokens/s that a paced target keeps through HTTP.
PROMISE = 0.97
COMPLETIONS = "/v1/completions"


def run_http(options: BenchOptions, progress: ProgressBar) -> Report:
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
            assert server.told["url"] and offline.told is not None  # waits
            contestants = {"http": partial(serve_round, server), "offline": partial(run_offline, offline)}
            for concurrency in concurrencies:
                where: Row = {"pace": pace or "none", "concurrency": concurrency}
                jobs = [workload.jobs(options.batches * concurrency, turn) for turn in range(turns)]
                work = [round_of(one, concurrency) for one in jobs]
                rounds = take_turns(contestants, work, done=partial(_report, progress, where))
                speeds.append({**where, **served_speed(rounds)})
                delays.append({**where, **delays_of(read_all(fetch(server, work[0], speculation={"detail": True})))})
                progress("delays")
    holds = all(row["ratio"].median >= PROMISE for row in speeds if row["pace"] != "none")
    return Report({"speeds": speeds, "delays": delays, "promise": PROMISE, "holds": holds})


def _report(progress: ProgressBar, where: Row, name: str) -> None:
    progress(f"{name}, pace {where['pace']}, {where['concurrency']} at a time")


def round_of(jobs: Sequence[Job], concurrency: int) -> Round:
    """Every job generates all its tokens: the end of sequence is ignored."""
    tasks = []
    for job in jobs:
        params = {name: getattr(job.params, name) for name in ("temperature", "max_tokens", "seed")}
        tasks.append(Task(job.prompt.text, {**params, "ignore_eos": True}))
    return Round(tasks, concurrency)


def served_speed(rounds: Mapping[str, Sequence[RoundResult]]) -> Row:
    """Figures of both contestants over rounds. CPU is seconds of it a second, 1 for a whole core, while the server
    served."""
    http, offline = rounds["http"], rounds["offline"]
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


def serve_round(server: Program, work: Round) -> RoundResult:
    """A round through HTTP."""
    processes = server.processes()
    before = {name: cpu_seconds(pid) for name, pid in processes.items()}
    client = time.process_time()
    exchanges = fetch(server, work)
    cpu = {name: cpu_seconds(pid) - before[name] for name, pid in processes.items()}
    cpu["client"] = time.process_time() - client
    return result_of(read_all(exchanges), cpu)


def result_of(answers: Sequence[Answer], cpu: dict[str, float]) -> RoundResult:
    seconds = max(answer.closed for answer in answers) - min(answer.sent for answer in answers)
    texts = ["".join(c["text"] for e in answer.events for c in e.data["choices"]) for answer in answers]
    return RoundResult(seconds, sum(answer.tokens for answer in answers), texts, cpu)


def fetch(server: Program, work: Round, **fields: Any) -> list[Exchange]:
    """Streamed completions, `fields` in the body of each."""
    bodies = [
        {"prompt": t.prompt, **t.params, **fields, "stream": True, "stream_options": {"include_usage": True}}
        for t in work.tasks
    ]
    with closing(asyncio.Runner(loop_factory=uvloop.new_event_loop)) as runner:
        return runner.run(_all(server.told["url"], bodies, work.concurrency))


def read_all(exchanges: Sequence[Exchange]) -> list[Answer]:
    """EngineError where one did not end well."""
    answers = [read(one.parts, one.sent, one.closed) for one in exchanges]
    if broken := [answer for answer in answers if answer.status != 200 or not answer.ended]:
        raise EngineError(f"server: {len(broken)} of {len(answers)} requests did not end well: {broken[0].events[-1:]}")
    return answers


async def _all(url: str, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[Exchange]:
    """Sends so many bodies at a time, in their order."""
    answers: dict[int, Exchange] = {}
    waiting = iter(enumerate(bodies))

    async def client() -> None:
        for index, body in waiting:
            answers[index] = await exchange(url, COMPLETIONS, body)

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return [answers[index] for index in range(len(bodies))]


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


# -- the client

EVENT_STREAM = b"text/event-stream"
DONE = b"[DONE]"


@dataclass(frozen=True)
class Part:
    """Bytes that the socket gave at a time."""

    at: float  # seconds of the host's monotonic clock
    data: bytes


@dataclass(frozen=True)
class Event:
    """A JSON object of an answer: of a stream, or the whole body."""

    at: float  # when its last byte had come
    data: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """Answer to a request; status 0 where it ended before one came."""

    status: int
    events: list[Event]
    ended: bool  # as it should: a stream by its last event, a body by its length
    sent: float
    closed: float
    size: int  # bytes, headers included

    @property
    def tokens(self) -> int:
        """Number of generated tokens by the answer's usage; 0 without one."""
        usages = [event.data["usage"] for event in self.events if event.data.get("usage")]
        return int(usages[-1]["completion_tokens"]) if usages else 0


class Exchange(asyncio.Protocol):
    """A request on a connection of its own, and its answer as it came, until the server closes it or `cut` bytes have
    come."""

    def __init__(self, request: bytes, cut: int | None) -> None:
        self.parts: list[Part] = []
        self.sent = self.closed = 0.0
        self.over = asyncio.get_running_loop().create_future()
        self._request, self._cut = request, cut
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # of uvloop's own class
        self.sent = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.parts.append(Part(time.perf_counter(), data))
        if self._cut is not None and self._transport is not None and size_of(self.parts) >= self._cut:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002  # what came tells
        self.closed = time.perf_counter()
        if not self.over.done():
            self.over.set_result(None)


def size_of(parts: Sequence[Part]) -> int:
    return sum(len(part.data) for part in parts)


async def exchange(url: str, path: str, body: dict[str, Any], cut: int | None = None) -> Exchange:
    """Posts a JSON body and waits for the answer; where `cut` is given the connection is broken off once so many bytes
    have come. OSError where nobody listens."""
    address = urlsplit(url)
    data = msgspec.json.encode(body)
    head = f"POST {path} HTTP/1.1\r\nhost: {address.netloc}\r\nconnection: close\r\n"
    request = f"{head}content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
    loop = asyncio.get_running_loop()
    transport, spoken = await loop.create_connection(
        lambda: Exchange(request, cut), address.hostname or "", address.port or 80
    )
    try:
        await spoken.over
    finally:
        transport.abort()
    return spoken


async def post(url: str, path: str, body: dict[str, Any], cut: int | None = None) -> Answer:
    """Sends a request as `exchange` does, and reads the answer."""
    spoken = await exchange(url, path, body, cut)
    return read(spoken.parts, spoken.sent, spoken.closed)


def read(parts: Sequence[Part], sent: float, closed: float) -> Answer:
    reader = _Reader()
    parser = httptools.HttpResponseParser(reader)
    for part in parts:
        reader.at = part.at
        parser.feed_data(part.data)
    status = parser.get_status_code() if reader.headed else 0
    return Answer(status, reader.events, reader.complete, sent, closed, size_of(parts))


class _Reader:
    """Callbacks of httptools' parser."""

    def __init__(self) -> None:
        self.at = 0.0
        self.events: list[Event] = []
        self.headed = self.complete = False
        self._stream = self._done = False
        self._body = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        self._stream |= name.lower() == b"content-type" and value.startswith(EVENT_STREAM)

    def on_headers_complete(self) -> None:
        self.headed = True

    def on_body(self, body: bytes) -> None:
        self._body += body
        if self._stream:
            *events, self._body = self._body.split(b"\n\n")
            for event in events:
                self._take(event.removeprefix(b"data: "))

    def on_message_complete(self) -> None:
        if not self._stream:
            self._take(self._body)
        self.complete = self._done or not self._stream

    def _take(self, data: bytes) -> None:
        if data == DONE:
            self._done = True
        else:
            self.events.append(Event(self.at, msgspec.json.decode(data)))
