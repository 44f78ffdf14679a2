"""The bench of what a transfer hides behind computing."""

from __future__ import annotations

import pytest

from pilotfish.bench.hidden_transfer import HandedTwice, row_of
from pilotfish.core.prefilling.handover import WHOLE, HandOverReport


def test_what_the_messages_took_is_not_hidden() -> None:
    cached = report(seconds=0.25, queued=0.05)
    handed = [
        HandedTwice(report(seconds=0.52, computing=0.40, queued=0.10, hidden=0.18), cached),
        HandedTwice(report(seconds=0.60, computing=0.60, queued=0.05, hidden=0.16), cached),
    ]
    assert [one.hidden for one in handed] == pytest.approx([0.9, 1.0])
    row = row_of(100, handed)
    assert row["needed_mb_per_s"] == pytest.approx(50 / 0.5) and row["computing_ms"] == pytest.approx(500)
    assert row["exposed_ms"].maximum == pytest.approx(20) and row["alone_ms"].median == pytest.approx(200)
    assert row["work_hidden"] == pytest.approx(0.85)


def report(**seconds: float) -> HandOverReport:
    return HandOverReport(transport="shm", outcome=WHOLE, size=50_000_000, transfer=0.2, **seconds)
