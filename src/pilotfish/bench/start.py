"""How long a server takes until it serves, and the memory of each of its processes then."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from pilotfish.bench.live import LiveServer, memory_bytes
from pilotfish.bench.report import print_table
from pilotfish.config import EngineConfig

MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class StartReport:
    target: str
    mode: str
    dtype: str
    seconds: list[float]  # of each start, until requests could be served
    resident_mib: dict[str, float]  # by role, the median of all starts; pages that processes share count in each

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def run_start(config: EngineConfig, repeats: int, done: Callable[[str], None] = lambda _: None) -> StartReport:
    """`done` is called after each start."""
    seconds: list[float] = []
    resident: dict[str, list[int]] = {}
    for _ in range(repeats):
        began = time.perf_counter()
        with LiveServer(config) as server:
            assert server.url  # waits
            seconds.append(time.perf_counter() - began)
            for role, pid in server.processes().items():
                resident.setdefault(role, []).append(memory_bytes(pid))
        done("starts")
    medians = {role: statistics.median(sizes) / MEBIBYTE for role, sizes in resident.items()}
    return StartReport(str(config.target), config.mode, config.dtype, seconds, medians)


def print_start(report: StartReport) -> None:
    times = f"{report.median:.1f} ({min(report.seconds):.1f} to {max(report.seconds):.1f})"
    title = f"{report.target}, {report.mode}, {report.dtype}, {len(report.seconds)} starts"
    header = ("seconds until ready: median", *(f"{role}, MiB" for role in report.resident_mib))
    print_table(title, header, [(times, *(f"{size:.0f}" for size in report.resident_mib.values()))])
