"""What both sides of a connection do: one-way delay from echoes, whatever the two clocks show; errors, sent seldom."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.core.peers.fields import MAX_TEXT, Echo
from pilotfish.core.peers.peer import CODES, PERIOD, EchoClock, ErrorReports

seconds = st.floats(0.0, 5.0)


@given(
    offsets=st.tuples(st.floats(0.0, 1e6), st.floats(0.0, 1e6)),
    way=st.floats(0.0, 0.2),
    waits=st.lists(st.tuples(seconds, seconds), min_size=1, max_size=30),
)
def test_the_delay_is_half_of_the_least_round_trip(
    offsets: tuple[float, float], way: float, waits: list[tuple[float, float]]
) -> None:
    """`waits`: how long a message lies at the draft until it is read, and how long until the answer is sent."""
    now, target, draft = 0.0, EchoClock(), EchoClock()
    for read, held in waits:
        hello = target.stamp(now + offsets[0])
        draft.hear(hello, now + way + read + offsets[1])
        answer = draft.stamp(now + way + read + held + offsets[1])
        target.hear(answer, now + 2 * way + read + held + offsets[0])
        now += 1.0 + read + held
    assert target.delay == pytest.approx(way + min(read for read, _ in waits[-16:]) / 2, abs=1e-5)


def test_nothing_is_known_before_a_message_came_back() -> None:
    clock = EchoClock()
    assert clock.delay is None and clock.stamp(3.0) == Echo(3_000_000)
    clock.hear(None, 1.0)
    clock.hear(Echo(5), 2.0)
    assert clock.delay is None and clock.stamp(2.5) == Echo(2_500_000, 5, 500_000)


@pytest.mark.parametrize("echo", [Echo(1, 3_000_000, 0), Echo(1, 0, (1 << 53) - 1)])
def test_an_echo_that_cannot_be_counts_for_nothing(echo: Echo) -> None:
    """Of a message that was not sent yet, or that was held for longer than it is old."""
    clock = EchoClock()
    clock.stamp(1.0)
    clock.hear(echo, 2.0)
    assert clock.delay is None


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
