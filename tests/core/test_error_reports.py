"""Errors are sent seldom, and none is forgotten."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pilotfish.core.peers.fields import MAX_TEXT
from pilotfish.core.peers.peer import CODES, PERIOD, ErrorReports


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.01, 0.4, 1.0, 3.0]), st.sampled_from(["ids", "gap"])), max_size=80))
def test_one_a_period_that_tells_of_all_before(waits: list[tuple[float, str]]) -> None:
    reports, now, last, told, seen = ErrorReports(), 0.0, dict[str, float](), dict[str, int](), dict[str, int]()
    for wait, code in waits:
        now, seen[code] = now + wait, seen.get(code, 0) + 1
        error = reports.of(code, "tree", "why", now)
        if error is not None:
            assert code not in last or now - last[code] >= PERIOD
            last[code], told[code] = now, told.get(code, 0) + error.count
            assert told[code] == seen[code]
        else:
            assert now - last[code] < PERIOD


def test_whatever_is_told_fits() -> None:
    (error,) = [ErrorReports().of("ids", "x" * 5000, "\x1b" * 5000, 0.0)]
    assert error is not None and len(error.about) == len(error.reason) == MAX_TEXT and error.reason.isprintable()
    assert error.code in CODES
