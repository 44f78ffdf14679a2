"""Features on their way to the rows of a trained head."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.core.features.features import FeatureLog, Features

LENGTH, WIDTH = 24, 2


def told(first: int, count: int) -> Features:
    """The feature of position p is p, p + 0.5."""
    return (np.arange(first, first + count)[:, None] + [0.0, 0.5]).astype(np.float32)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, LENGTH), st.integers(0, 6)),
            st.tuples(st.just("forget"), st.integers(0, LENGTH), st.just(0)),
        )
    )
)
def test_what_was_told_is_found_until_it_is_forgotten(events: list[tuple[str, int, int]]) -> None:
    log, known, forgotten = FeatureLog(WIDTH), set[int](), 0
    for what, at, count in events:
        if what == "put":
            log.put(at, told(at, count))
            known |= {p for p in range(at, at + count) if p >= forgotten}
        else:
            log.forget(at)
            forgotten = max(forgotten, at - 1)
            known = {p for p in known if p >= forgotten}
        rows = log.of_rows(0, LENGTH + 8)
        found = {row - 1 for row in range(LENGTH + 8) if not np.isnan(rows[row]).any()}
        assert found == known and all((rows[p + 1] == told(p, 1)[0]).all() for p in known)
        assert log.reach == max({p + 1 for p in known} | {forgotten})


def test_a_row_is_kept_without_those_that_came_with_it() -> None:
    """Or whoever sends the same rows again and again, one further each time, fills the memory."""
    log, frame = FeatureLog(2), np.zeros((100, 2), np.float32)
    log.put(0, frame)
    assert not np.shares_memory(log._rows[99], frame) and log._rows[99].base is None
