"""A server under load: streams of all kinds at a time, some of which break off, against the same requests alone."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import uvloop

from pilotfish.bench.exchange import Answer, post
from pilotfish.bench.http import percentile
from pilotfish.bench.live import LiveServer, memory_bytes
from pilotfish.bench.machine import Machine, describe_machine
from pilotfish.bench.mix import Asked, Output, agrees, mixed, outputs
from pilotfish.bench.report import print_table
from pilotfish.bench.workload import Prompt
from pilotfish.config import EngineConfig
from pilotfish.errors import EngineError
from pilotfish.model.loader import load_config
from pilotfish.model.metadata import load_tokenizer

#: Tokens that may wait: no request of the mix is turned away.
QUEUE = ("--max-queued-requests=4096", f"--max-queued-tokens={1 << 24}")
#: A process's memory is flat if, in the second half, it grows by less than this share or by less than these bytes.
FLAT_SHARE, FLAT_BYTES = 0.01, 2 << 20
MEBIBYTE = 1 << 20
#: Seconds after the last answer in which all that was held must have been given back: statuses come once a second.
SETTLE = 10.0
#: What must be zero then.
HELD = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    "pilotfish_requests_in_flight",
)
GENERATED = "vllm:generation_tokens_total"


@dataclass(frozen=True)
class Load:
    """What is run: `streams` clients for `seconds`; a share `aborts` of the streamed requests is broken off."""

    prompts: list[Prompt]
    requests: int  # distinct
    streams: int
    seconds: float
    max_tokens: int
    aborts: float


@dataclass(frozen=True)
class Known:
    """A request, what it is answered when it is alone, and how many bytes that is."""

    asked: Asked
    expected: dict[int, Output]
    size: int


@dataclass(frozen=True)
class Memory:
    """A process's resident memory over the run, and the line through its second half."""

    first_mib: float
    last_mib: float
    peak_mib: float
    mib_per_minute: float
    relative: float  # growth over the second half by that line, as a share of its mean
    flat: bool


@dataclass(frozen=True)
class Quantiles:
    """Milliseconds."""

    count: int
    median: float
    p90: float
    p99: float


@dataclass(frozen=True)
class LoadReport:
    machine: Machine
    target: str
    mode: str
    dtype: str
    streams: int
    seconds: float
    requests: int
    kinds: dict[str, int]  # answered
    statuses: dict[str, int]
    refused: int  # 429s
    aborted: int
    failed: int  # answers that ended without being broken off, and not well
    unequal: int
    unequal_kinds: dict[str, int]
    tokens_per_second: float
    first_token: Quantiles
    between_events: Quantiles
    memory: dict[str, Memory]
    held: dict[str, float]  # afterwards
    holds: bool


@dataclass
class Tally:
    """What came of the requests so far."""

    statuses: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    unequal: Counter[str] = field(default_factory=Counter)
    aborted: int = 0
    failed: int = 0
    first: list[float] = field(default_factory=list)  # milliseconds
    between: list[float] = field(default_factory=list)

    def add(self, known: Known, answer: Answer, *, cut: bool) -> None:
        kind = known.asked.kind
        self.statuses[str(answer.status or "none")] += 1
        self.kinds[kind] += 1
        self.aborted += cut and not answer.ended
        self.failed += not cut and not answer.ended
        if answer.status == 200:
            self.unequal[kind] += not agrees(answer, known.expected)
            if known.asked.stream:
                self._times(answer)

    def _times(self, answer: Answer) -> None:
        times = [event.at for event in answer.events if event.data.get("choices")]
        self.first += [1000 * (at - answer.sent) for at in times[:1]]
        self.between += [1000 * (b - a) for a, b in pairwise(times)]


def run_load(
    config: EngineConfig, load: Load, machine: Machine | None = None, done: Callable[[str], None] = lambda _: None
) -> LoadReport:
    """`done` is called with a label for each request that is run alone, then each second."""
    tokenizer, context = load_tokenizer(config.target), load_config(config.target).max_position_embeddings
    asked = mixed(load.prompts, tokenizer, context, load.requests, load.max_tokens)
    with LiveServer(config, QUEUE) as server, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        known = runner.run(alone(server.url, asked, done))
        before = server.metrics()[GENERATED]
        tally, memory, seconds = runner.run(_loaded(server, load, known, done))
        held = settled(server.metrics)
        tokens = server.metrics()[GENERATED] - before
    unequal = sum(tally.unequal.values())
    refused, flat = tally.statuses["429"], all(one.flat for one in memory.values())
    broken = unequal + tally.failed + sum(number for status, number in tally.statuses.items() if status != "200")
    return LoadReport(
        machine=machine or describe_machine(config.dtype),
        target=str(config.target),
        mode=config.mode,
        dtype=config.dtype,
        streams=load.streams,
        seconds=seconds,
        requests=load.requests,
        kinds=dict(tally.kinds),
        statuses=dict(tally.statuses),
        refused=refused,
        aborted=tally.aborted,
        failed=tally.failed,
        unequal=unequal,
        unequal_kinds={kind: number for kind, number in tally.unequal.items() if number},
        tokens_per_second=tokens / seconds,
        first_token=quantiles(tally.first),
        between_events=quantiles(tally.between),
        memory=memory,
        held=held,
        holds=not broken and flat and not any(held.values()),
    )


def num_ticks(load: Load) -> int:
    """How often `run_load` calls `done`, about."""
    return load.requests + int(load.seconds)


async def alone(url: str, asked: Sequence[Asked], done: Callable[[str], None]) -> list[Known]:
    """Each request with what it is answered while no other runs."""
    known = []
    for one in asked:
        answer = await post(url, one.path, one.body)
        if answer.status != 200 or not answer.ended:
            raise EngineError(f"server: {one.kind}: status {answer.status}: {answer.events[-1:]}")
        known.append(Known(one, outputs(answer), answer.size))
        done("each request alone")
    return known


async def _loaded(
    server: LiveServer, load: Load, known: Sequence[Known], done: Callable[[str], None]
) -> tuple[Tally, dict[str, Memory], float]:
    tally, began, over = Tally(), time.monotonic(), asyncio.Event()
    clients = [_client(server.url, load, known, tally, began + load.seconds, seed) for seed in range(load.streams)]
    label = f"{load.streams} streams"
    sampling = asyncio.create_task(_sample(server.processes(), over, lambda: done(label)))
    try:
        await asyncio.gather(*clients)
    finally:
        over.set()
    seconds = time.monotonic() - began
    return tally, {name: memory_of(samples) for name, samples in (await sampling).items()}, seconds


async def _sample(
    processes: Mapping[str, int], over: asyncio.Event, done: Callable[[], None]
) -> dict[str, list[tuple[float, int]]]:
    """Seconds and resident bytes of each process, once a second and at the end."""
    samples: dict[str, list[tuple[float, int]]] = {name: [] for name in processes}
    while True:
        for name, pid in processes.items():
            samples[name].append((time.monotonic(), memory_bytes(pid)))
        if over.is_set():
            return samples
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), 1.0)
        done()


async def _client(url: str, load: Load, known: Sequence[Known], tally: Tally, until: float, seed: int) -> None:
    """One request after the other, in an order of its own, until the time is over."""
    draw = random.Random(seed)
    while time.monotonic() < until:
        one = draw.choice(known)
        cut = draw.randrange(1, one.size) if one.asked.stream and draw.random() < load.aborts else None
        answer = await post(url, one.asked.path, one.asked.body, cut)
        tally.add(one, answer, cut=cut is not None)


def settled(
    metrics: Callable[[], Mapping[str, float]], sleep: Callable[[float], None] = time.sleep
) -> dict[str, float]:
    """What is held once nothing is any more, or at the latest after SETTLE seconds."""
    for _ in range(round(SETTLE / 0.25)):
        found = metrics()
        held = {name: found[name] for name in HELD}
        if not any(held.values()):
            break
        sleep(0.25)
    return held


def memory_of(samples: Sequence[tuple[float, int]]) -> Memory:
    """Of seconds and bytes in their order."""
    sizes = [size for _, size in samples]
    late = np.array(samples[len(samples) // 2 :], dtype=float)
    seconds = float(late[-1, 0] - late[0, 0])
    slope = float(np.polyfit(late[:, 0] - late[0, 0], late[:, 1], 1)[0]) if seconds > 0 else 0.0
    grown, mean = slope * seconds, float(late[:, 1].mean())
    return Memory(
        first_mib=sizes[0] / MEBIBYTE,
        last_mib=sizes[-1] / MEBIBYTE,
        peak_mib=max(sizes) / MEBIBYTE,
        mib_per_minute=60 * slope / MEBIBYTE,
        relative=grown / mean,
        flat=grown < max(FLAT_SHARE * mean, FLAT_BYTES),
    )


def quantiles(values: Sequence[float]) -> Quantiles:
    if not values:
        return Quantiles(0, 0.0, 0.0, 0.0)
    return Quantiles(len(values), *(percentile(values, share) for share in (0.5, 0.9, 0.99)))


def print_load(report: LoadReport) -> None:
    what = f"mode {report.mode}, {report.dtype}, {report.streams} streams for {report.seconds:.0f} s"
    counted = {
        "answers": sum(report.kinds.values()),
        "statuses": ", ".join(f"{status}: {number}" for status, number in report.statuses.items()),
        "broken off by the client": report.aborted,
        "ended badly": report.failed,
        "unequal to the same alone": f"{report.unequal} {report.unequal_kinds or ''}",
        "tokens/s": f"{report.tokens_per_second:.1f}",
        **{f"held afterwards: {name}": f"{value:g}" for name, value in report.held.items()},
        "all as it should be": "yes" if report.holds else "no",
    }
    print_table(f"{report.target}, {what}, {report.requests} distinct requests", ("", ""), counted.items())
    times = {"first token": report.first_token, "between events": report.between_events}
    rows = [(name, q.count, *(f"{v:.1f}" for v in (q.median, q.p90, q.p99))) for name, q in times.items()]
    print_table("", ("ms", "count", "median", "90 %", "99 %"), rows)
    header = ("memory, MiB", "first", "last", "peak", "a minute, second half", "growth of it", "flat")
    print_table("", header, [_memory_row(name, memory) for name, memory in report.memory.items()])


def _memory_row(name: str, memory: Memory) -> tuple[object, ...]:
    sizes = (f"{size:.0f}" for size in (memory.first_mib, memory.last_mib, memory.peak_mib))
    return (name, *sizes, f"{memory.mib_per_minute:+.2f}", f"{memory.relative:+.2%}", "yes" if memory.flat else "no")
