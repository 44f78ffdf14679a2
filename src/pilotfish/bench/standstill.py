"""A target's process that stands still under open streams: what its clients get, and when anybody is told."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import uvloop

from pilotfish.bench.exchange import post
from pilotfish.bench.live import LiveServer
from pilotfish.bench.load import QUEUE, Known, alone
from pilotfish.bench.mix import COMPLETIONS, Asked, agrees
from pilotfish.bench.report import print_table
from pilotfish.bench.workload import Prompt
from pilotfish.config import EngineConfig
from pilotfish.errors import EngineError

#: Seconds from the first event of a stream until the target is stopped.
WARM = 0.3
RESTARTS = "pilotfish_target_restarts_total"


@dataclass(frozen=True)
class Standstill:
    """One stop of the target."""

    seconds: float
    streams: int
    unequal: int  # whose output is not that of the same request alone
    broken: int  # that ended before their time
    told_after: float | None  # seconds until /ready was no longer 200; None: it was all the time
    restarts: int


@dataclass(frozen=True)
class StandstillReport:
    target: str
    mode: str
    dtype: str
    target_timeout: float
    stops: list[Standstill]

    @property
    def holds(self) -> bool:
        """Whether below the limit nothing changed but the time."""
        below = [stop for stop in self.stops if stop.seconds < self.target_timeout]
        return not any(stop.unequal or stop.broken or stop.restarts for stop in below)


def run_standstill(
    config: EngineConfig,
    prompts: Sequence[Prompt],
    max_tokens: int,
    streams: int,
    stops: Sequence[float],
    target_timeout: float,
    done: Callable[[str], None] = lambda _: None,
) -> StandstillReport:
    """`done` is called for each request that is run alone, and after each stop."""
    asked = [request(prompts[i % len(prompts)], i, max_tokens) for i in range(streams)]
    options = [*QUEUE, f"--target-timeout={target_timeout}"]
    with LiveServer(config, options) as server, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        known = runner.run(alone(server.url, asked, done))
        results = []
        for seconds in stops:
            results.append(runner.run(_stopped(server, known, seconds)))
            done(f"{seconds:g} s")
    return StandstillReport(str(config.target), config.mode, config.dtype, target_timeout, results)


def request(prompt: Prompt, number: int, max_tokens: int) -> Asked:
    """A stream that does not end early."""
    body = {"prompt": prompt.text, "max_tokens": max_tokens, "temperature": 0.8, "seed": number, "stream": True}
    return Asked("completion", COMPLETIONS, {**body, "ignore_eos": True, "stream_options": {"include_usage": True}})


async def _stopped(server: LiveServer, known: Sequence[Known], seconds: float) -> Standstill:
    before, pid = server.metrics()[RESTARTS], server.processes()["target"]
    answers = [asyncio.create_task(post(server.url, one.asked.path, one.asked.body)) for one in known]
    await asyncio.sleep(WARM)
    if all(answer.done() for answer in answers):
        raise EngineError("max_tokens: all streams had ended before the target was stopped; more are needed")
    os.kill(pid, signal.SIGSTOP)
    try:
        told = await asyncio.to_thread(_unready_after, server.url, seconds)
    finally:
        with suppress(ProcessLookupError):  # it was killed after the limit
            os.kill(pid, signal.SIGCONT)
    done = [await answer for answer in answers]
    unequal = sum(not agrees(answer, one.expected) for answer, one in zip(done, known, strict=True))
    broken = sum(answer.status != 200 or not answer.ended or _failed(answer.events[-1].data) for answer in done)
    while not await asyncio.to_thread(_is_ready, server.url):
        await asyncio.sleep(0.1)
    restarts = int(server.metrics()[RESTARTS] - before)
    return Standstill(seconds, len(known), unequal, broken, told, restarts)


def _failed(last: dict[str, object]) -> bool:
    return "error" in last


def _unready_after(url: str, seconds: float) -> float | None:
    """Watches for so long."""
    began, told = time.perf_counter(), None
    while (passed := time.perf_counter() - began) < seconds:
        if told is None and not _is_ready(url):
            told = passed
        time.sleep(0.05)
    return told


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=30) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError:
        return False


def print_standstill(report: StandstillReport) -> None:
    rows = [
        (
            f"{stop.seconds:g} s",
            stop.streams,
            stop.unequal,
            stop.broken,
            "never" if stop.told_after is None else f"{stop.told_after:.1f} s",
            stop.restarts,
        )
        for stop in report.stops
    ]
    title = f"{report.target}, {report.mode}, {report.dtype}, target timeout {report.target_timeout:g} s"
    print_table(title, ("stopped for", "streams", "unequal", "broken off", "not ready after", "restarts"), rows)
