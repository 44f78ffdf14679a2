"""What HTTP costs: tokens per second through a server beside the offline engine's, and how long a token takes from the
target to the client's socket."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import msgspec
import uvloop

from pilotfish.bench.compare import Spread, pairwise_ratios
from pilotfish.bench.exchange import Answer, Unread, exchange, read
from pilotfish.bench.live import LiveServer, cpu_seconds
from pilotfish.bench.machine import Machine, describe_machine
from pilotfish.bench.offline import READY, Outcome, Round, Task, offline_spec
from pilotfish.bench.report import print_table
from pilotfish.bench.workload import Prompt
from pilotfish.config import EngineConfig
from pilotfish.engine.process import worker_environment
from pilotfish.errors import EngineError

#: Share of the offline engine's tokens/s that a paced target keeps through HTTP.
PROMISE = 0.97
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True)
class Shape:
    """What is generated: in each round `batches` times as many sequences as run at a time."""

    prompts: list[Prompt]
    temperature: float
    max_tokens: int
    batches: int
    repeats: int

    def round(self, concurrency: int, turn: int) -> Round:
        """Prompts over and over, each time with another seed."""
        number = self.batches * concurrency
        tasks = [self._task(turn * number + i) for i in range(number)]
        return Round(tasks, concurrency)

    def _task(self, index: int) -> Task:
        prompt = self.prompts[index % len(self.prompts)]
        params = {"temperature": self.temperature, "max_tokens": self.max_tokens, "ignore_eos": True}
        return Task(prompt.text, {**params, "seed": prompt.seed + index})


@dataclass(frozen=True)
class HttpSpeed:
    """Both contestants at one pace and concurrency. CPU is seconds of it a second, 1 for a whole core."""

    pace: str
    concurrency: int
    offline: Spread  # tokens/s
    http: Spread
    ratio: Spread  # http over offline, round by round
    equal_outputs: float  # share of the texts
    cpu: dict[str, float]  # of each of the server's processes and of the client, while it served


@dataclass(frozen=True)
class Delay:
    """From the moment a step's tokens are known to the client's socket having them, in ms, a whole event at a time."""

    pace: str
    concurrency: int
    events: int
    median: float
    p99: float


@dataclass(frozen=True)
class HttpReport:
    machine: Machine
    target: str
    mode: str
    dtype: str
    threads: int
    prompts: int
    temperature: float
    max_tokens: int
    batches: int
    repeats: int
    speeds: list[HttpSpeed]
    delays: list[Delay]
    holds: bool  # every paced ratio's median is at least PROMISE


@dataclass(frozen=True)
class Served:
    """A round through HTTP."""

    seconds: float
    answers: list[Answer]
    cpu: dict[str, float]  # seconds

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def texts(self) -> list[str]:
        return [
            "".join(choice["text"] for e in answer.events for choice in e.data["choices"]) for answer in self.answers
        ]


class Offline:
    """The offline engine's process."""

    def __init__(self, config: EngineConfig) -> None:
        spec = offline_spec(config)
        environment = worker_environment(spec)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(list(spec.command), stdin=pipe, stdout=pipe, env=environment)

    def wait(self) -> None:
        """Until it is ready; EngineError where it ends instead."""
        self._line(READY)

    def run(self, work: Round) -> Outcome:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(work) + b"\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._line(), type=Outcome)

    def _line(self, expected: bytes | None = None) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line or expected not in (None, line):
            raise EngineError(f"offline engine: exited with code {self._process.wait()}")
        return line

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def __enter__(self) -> Offline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def run_http(
    config: EngineConfig,
    shape: Shape,
    paces: Sequence[str],
    concurrencies: Sequence[int],
    machine: Machine | None = None,
    done: Callable[[str], None] = lambda _: None,
) -> HttpReport:
    """At each pace a server and an offline engine, both of `config`, take turns: a warm-up, `repeats` rounds, and one
    of the server's alone whose events tell of the steps. `done` is called with a label for each round."""
    speeds: list[HttpSpeed] = []
    delays: list[Delay] = []
    config = replace(config, max_requests=max(*concurrencies, config.max_requests))
    for pace in paces:
        paced = replace(config, pace=pace)
        with LiveServer(paced) as server, Offline(paced) as offline:
            offline.wait()
            for concurrency in concurrencies:
                speeds.append(_compare(server, offline, shape, pace, concurrency, done))
                delays.append(_delay(server, shape, pace, concurrency))
                done(f"{pace or 'unpaced'}, {concurrency} at a time: delays")
    return HttpReport(
        machine=machine or describe_machine(config.dtype),
        target=str(config.target),
        mode=config.mode,
        dtype=config.dtype,
        threads=config.threads,
        prompts=len(shape.prompts),
        temperature=shape.temperature,
        max_tokens=shape.max_tokens,
        batches=shape.batches,
        repeats=shape.repeats,
        speeds=speeds,
        delays=delays,
        holds=all(speed.ratio.median >= PROMISE for speed in speeds if speed.pace),
    )


def num_rounds(paces: Sequence[str], concurrencies: Sequence[int], repeats: int) -> int:
    """How often `run_http` calls `done`."""
    return len(paces) * len(concurrencies) * (2 * (repeats + 1) + 1)


def _compare(
    server: LiveServer, offline: Offline, shape: Shape, pace: str, concurrency: int, done: Callable[[str], None]
) -> HttpSpeed:
    served: list[Served] = []
    alone: list[Outcome] = []
    label = f"{pace or 'unpaced'}, {concurrency} at a time"
    for turn in range(shape.repeats + 1):
        work = shape.round(concurrency, turn)
        order = [lambda w=work: served.append(serve_round(server, w)), lambda w=work: alone.append(offline.run(w))]
        for contestant in order if turn % 2 else reversed(order):
            contestant()
            done(label)
    return speed_of(pace, concurrency, served[1:], alone[1:])


def speed_of(pace: str, concurrency: int, served: Sequence[Served], alone: Sequence[Outcome]) -> HttpSpeed:
    """Of rounds in the same order."""
    http = [run.tokens / run.seconds for run in served]
    offline = [run.tokens / run.seconds for run in alone]
    equal = [
        a == b for run, other in zip(served, alone, strict=True) for a, b in zip(run.texts, other.texts, strict=True)
    ]
    seconds = sum(run.seconds for run in served)
    return HttpSpeed(
        pace=pace,
        concurrency=concurrency,
        offline=Spread.of(offline),
        http=Spread.of(http),
        ratio=Spread.of(pairwise_ratios(http, offline)),
        equal_outputs=statistics.mean(equal),
        cpu={name: sum(run.cpu[name] for run in served) / seconds for name in served[0].cpu},
    )


def _delay(server: LiveServer, shape: Shape, pace: str, concurrency: int) -> Delay:
    run = serve_round(server, shape.round(concurrency, 0), speculation={"detail": True})
    waits = delays_of(run.answers)
    return Delay(pace, concurrency, len(waits), statistics.median(waits), percentile(waits, 0.99))


def delays_of(answers: Sequence[Answer]) -> list[float]:
    """Milliseconds of each event that tells of a step."""
    events = [event for answer in answers for event in answer.events if "pilotfish" in event.data]
    return [1000 * (event.at - event.data["pilotfish"]["steps"][-1]["verified"]) for event in events]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so many others do not exceed."""
    ranked = sorted(values)
    return ranked[min(int(share * len(ranked)), len(ranked) - 1)]


def serve_round(server: LiveServer, work: Round, **fields: Any) -> Served:
    """Streamed completions, `fields` in the body of each; EngineError where one does not end well."""
    bodies = [
        {"prompt": t.prompt, **t.params, **fields, "stream": True, "stream_options": {"include_usage": True}}
        for t in work.tasks
    ]
    url, processes = server.url, server.processes()
    before = {name: cpu_seconds(pid) for name, pid in processes.items()}
    client = time.process_time()
    with closing(asyncio.Runner(loop_factory=uvloop.new_event_loop)) as runner:
        unread = runner.run(_all(url, bodies, work.concurrency))
    cpu = {name: cpu_seconds(pid) - before[name] for name, pid in processes.items()}
    cpu["client"] = time.process_time() - client
    seconds = max(one.closed for one in unread) - min(one.sent for one in unread)
    answers = [read(one) for one in unread]
    if broken := [answer for answer in answers if answer.status != 200 or not answer.ended]:
        raise EngineError(f"server: {len(broken)} of {len(answers)} requests did not end well: {broken[0].events[-1:]}")
    return Served(seconds, answers, cpu)


async def _all(url: str, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[Unread]:
    """So many at a time, in their order."""
    answers: dict[int, Unread] = {}
    waiting = iter(enumerate(bodies))

    async def client() -> None:
        for index, body in waiting:
            answers[index] = await exchange(url, COMPLETIONS, body)

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return [answers[index] for index in range(len(bodies))]


def print_http(report: HttpReport) -> None:
    what = f"mode {report.mode}, {report.dtype}, T={report.temperature:g}"
    size = f"{report.batches} x concurrency sequences of {report.max_tokens} tokens, {report.repeats} rounds"
    columns = ("offline tokens/s", "http tokens/s", "http over offline", "equal outputs", "CPU, in cores")
    title = f"{report.target}, {what}, {size}"
    print_table(title, ("pace", "at a time", *columns), map(_speed_row, report.speeds))
    rows = [(d.pace or "none", d.concurrency, d.events, f"{d.median:.2f}", f"{d.p99:.2f}") for d in report.delays]
    print_table(
        "from verify's end to the client's socket", ("pace", "at a time", "events", "median ms", "p99 ms"), rows
    )
    print_table(f"at least {PROMISE} where paced: {'yes' if report.holds else 'no'}", (), [])


def _speed_row(speed: HttpSpeed) -> tuple[object, ...]:
    cpu = ", ".join(f"{name} {share:.2f}" for name, share in speed.cpu.items())
    ratio = f"{speed.ratio.median:.3f} ({speed.ratio.minimum:.3f} – {speed.ratio.maximum:.3f})"
    return (
        speed.pace or "none",
        speed.concurrency,
        speed.offline,
        speed.http,
        ratio,
        f"{speed.equal_outputs:.0%}",
        cpu,
    )
