"""The bench of transports, with a little of everything; no test says how fast."""

from __future__ import annotations

import pytest
from conftest import Measure

from pilotfish.bench import transfer
from pilotfish.bench.transfer import CHECKSUM, COPY, label, run_transfer
from pilotfish.kv.nixl import nixl_installed
from pilotfish.kv.readers import content

SIZES = (1 << 15, 1 << 17)
WAYS = [COPY, CHECKSUM, "shm", "ipc", "tcp", "tcp, encrypted", *(["nixl"] if nixl_installed() else [])]


def test_each_way_reads_segments_of_each_size(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte of them is checked where it arrives."""
    checked: list[int] = []
    monkeypatch.setattr("pilotfish.kv.readers.content", lambda data: checked.append(len(data)) or content(data))
    monkeypatch.setattr(transfer, "SIZES", SIZES)
    monkeypatch.setattr(transfer, "TOTAL", 1 << 21)
    report = measure(run_transfer, "transfer", repeats=1)
    speeds, shares = report.results["gb_per_s"], report.results["of_a_copy"]
    assert [row["transport"] for row in speeds] == WAYS and [row["transport"] for row in shares] == WAYS[1:]
    assert all(row[label(size)] > 0 for row in speeds for size in SIZES)
    transports, rounds = len(WAYS) - 2, 2
    assert sum(checked) == transports * rounds * len(SIZES) * (1 << 21)
