"""Files of acceptance traces, and drawn ones."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish.errors import ParameterError
from pilotfish.plan.simulation.acceptance import (
    AcceptanceTrace,
    TracedPair,
    TracedSequence,
    drawn_acceptance,
    read_acceptance,
    write_acceptance,
)

PAIR = TracedPair("target", "draft", 0.8, 100)
SEQUENCES = [
    TracedSequence("a", [1, 2], [3, 4], [[3, 5], [6, 4]], [[-0.1, -2.5], [-0.7, -0.7]]),
    TracedSequence("b", [7], [8], [[9, 5]], [[-0.25, -1.5]]),
]


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_file_gives_back_what_was_written(tmp_path: Path, name: str) -> None:
    write_acceptance(tmp_path / name, PAIR, SEQUENCES)
    read, written = read_acceptance(tmp_path / name), AcceptanceTrace.of(PAIR, SEQUENCES)
    assert (read.pair, list(read.prompts)) == (PAIR, [[1, 2], [7]])
    for field in ("first", "tokens", "guesses", "log_chances"):
        assert np.array_equal(getattr(read, field), getattr(written, field))
    assert read.ranks.tolist() == [0, 1, 2]
    assert read.acceptance == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"id": "b", "prompt": [7]}', "trace.jsonl:3.*`tokens`"),
        (b'{"id": "b", "prompt": [7], "tokens": [8], "guesses": [[9]], "log_chances": [[0.5]]}', "trace.jsonl:3.*<= 0"),
        (b'{"id": "b", "prompt": [7], "tokens": [8], "guesses": [[9]], "log_chances": [[-1]]}', "'b' is not.*as many"),
        (b"{", "trace.jsonl:3"),
        (b'{"id": "\xff"}', "trace.jsonl:3"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "trace.jsonl"
    write_acceptance(path, PAIR, SEQUENCES[:1])
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(ParameterError, match=reason):
        read_acceptance(path)


def test_a_file_that_is_cut_off_or_not_there_is_refused(tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b"x" * 1000)[:-8])
    garbage = tmp_path / "garbage.jsonl.gz"
    garbage.write_bytes(gzip.compress(b"x" * 1000)[:10] + b"\xff" * 20)
    for path in (cut, garbage, tmp_path / "missing.jsonl"):
        with pytest.raises(ParameterError, match="a readable file"):
            read_acceptance(path)


@settings(max_examples=10)
@given(st.floats(0.05, 0.95))
def test_drawn_guesses_are_right_as_often_as_they_say(acceptance: float) -> None:
    trace = drawn_acceptance(acceptance, sequences=8, output=1024)
    first, chances = trace.guesses[:, 0] == trace.tokens, np.exp(trace.log_chances[:, 0])
    assert abs(first.mean() - chances.mean()) < 0.03
    assert np.all(np.diff(trace.log_chances, axis=1) <= 0)
    assert all(len(set(row)) == trace.width for row in trace.guesses[:64].tolist())
