"""What a report says of a hand-over's time, and sums of reports."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.core.handover import WHOLE, HandOver, HandOverReport, HandOverTotals

seconds = st.floats(0, 100)


def test_what_is_exposed_and_what_is_hidden() -> None:
    report = HandOverReport(outcome=WHOLE, began=7.0, seconds=2.0, queued=0.5, computing=1.25, transfer=0.75)
    assert (report.exposed, report.hidden, report.lost) == (0.25, 0.5, 0.0)


def test_of_one_that_ended_early_all_time_is_lost() -> None:
    report = HandOverReport(outcome="late", seconds=2.0, transfer=0.75)
    assert (report.exposed, report.hidden, report.lost) == (0.0, 0.0, 2.0)


def test_of_one_whose_pool_did_not_say_how_long_it_took_no_part_is_known() -> None:
    report = HandOverReport(outcome=WHOLE, seconds=2.0, transfer=0.75)
    assert (report.exposed, report.hidden, report.lost) == (0.0, 0.0, 0.0)


@given(seconds, seconds, seconds, seconds, st.sampled_from([WHOLE, "gone"]))
def test_no_part_is_less_than_nothing_and_hidden_is_a_part_of_the_transfer(
    whole: float, queued: float, computing: float, transfer: float, outcome: str
) -> None:
    report = HandOverReport(
        outcome=outcome, seconds=whole, queued=queued, computing=computing, transfer=transfer
    )  # clocks of two processes may disagree
    assert min(report.exposed, report.hidden, report.lost) >= 0
    assert report.hidden <= report.transfer
    assert max(report.exposed, report.lost) <= report.seconds


def test_an_end_says_how_much_came() -> None:
    handover = HandOver(range(10), np.arange(6, dtype=np.int32), report=HandOverReport(began=3.0))
    handover.end(4, "content", 5.5)
    assert (handover.first, handover.count) == (4, 4)
    assert handover.report == HandOverReport(outcome="content", began=3.0, seconds=2.5, tokens=4)


def test_totals_add_up() -> None:
    totals = HandOverTotals()
    totals.add(HandOverReport(outcome=WHOLE, seconds=1.0, computing=0.75, transfer=0.5, size=640, tokens=10))
    totals.add(HandOverReport(outcome=WHOLE, seconds=1.0, computing=1.0, transfer=0.5, size=64, tokens=1))
    totals.add(HandOverReport(outcome="late", seconds=1.0, transfer=0.25, size=128, tokens=2))
    assert totals.outcomes == {WHOLE: 2, "late": 1}
    assert (totals.tokens, totals.size) == (13, 832)
    assert (totals.transfer, totals.hidden) == (pytest.approx(1.25), pytest.approx(0.75))
