"""What a report says of a hand-over's time, and sums of reports."""

from __future__ import annotations

import numpy as np
import pytest
from handover_world import WELCOME
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.core.prefilling.handover import WHOLE, HandOver, HandOverReport, HandOverTotals
from pilotfish.core.prefilling.incoming import Incoming
from pilotfish.core.prefilling.prefill_pools import PrefillPool

seconds = st.floats(0, 100)


def incoming(report: HandOverReport, *landings: tuple[float, float]) -> Incoming:
    handover = HandOver(range(4), np.arange(4, dtype=np.int32), report=report)
    pool = PrefillPool("east", b"0", welcome=WELCOME)
    return Incoming(1, handover, pool, 0.0, 9.0, 1.0, landings=list(landings))


@pytest.mark.parametrize(
    ("outcome", "parts", "exposed", "lost", "hidden"),
    [
        (WHOLE, (0.5, 1.25), 0.25, 0.0, 0.375),  # the pool had computed by 8.75
        (WHOLE, (0.0, 0.0), 0.0, 0.0, 0.0),  # it did not say how long it took: no part is known
        ("late", (0.0, 0.0), 0.0, 2.0, 0.0),  # all time is lost
    ],
)
def test_what_is_exposed_and_what_is_hidden(
    outcome: str, parts: tuple[float, float], exposed: float, lost: float, hidden: float
) -> None:
    report = HandOverReport(outcome=outcome, began=7.0, seconds=2.0, queued=parts[0], computing=parts[1])
    assert (report.exposed, report.lost) == (exposed, lost)
    assert incoming(report, (7.75, 0.125), (8.75, 0.25), (9.0, 0.375)).hidden == hidden


@given(seconds, seconds, seconds, st.sampled_from([WHOLE, "gone"]))
def test_no_part_is_less_than_nothing(whole: float, queued: float, computing: float, outcome: str) -> None:
    """Clocks of two processes may disagree."""
    report = HandOverReport(outcome=outcome, seconds=whole, queued=queued, computing=computing)
    assert 0 <= min(report.exposed, report.lost) <= max(report.exposed, report.lost) <= report.seconds


def test_an_end_says_how_much_came() -> None:
    handover = HandOver(range(10), np.arange(6, dtype=np.int32), report=HandOverReport(began=3.0))
    handover.end(4, "content", 5.5)
    assert (handover.first, handover.count) == (4, 4)
    assert handover.report == HandOverReport(outcome="content", began=3.0, seconds=2.5, tokens=4)


def test_totals_add_up() -> None:
    totals = HandOverTotals()
    totals.add(HandOverReport(outcome=WHOLE, transfer=0.5, hidden=0.25, size=640, tokens=10))
    totals.add(HandOverReport(outcome=WHOLE, transfer=0.5, hidden=0.5, size=64, tokens=1))
    totals.add(HandOverReport(outcome="late", transfer=0.25, size=128, tokens=2))
    assert totals == HandOverTotals({WHOLE: 2, "late": 1}, tokens=13, size=832, transfer=1.25, hidden=0.75)
