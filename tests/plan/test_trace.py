"""Recorded traffic: what is read, and the line that is no request."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from pilotfish.errors import InputError
from pilotfish.plan.trace import TimedRequest, TracedRequest, read_trace

TIMED = '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}\n'


def test_a_timed_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(2 * TIMED)
    assert read_trace(path, TimedRequest) == 2 * [TimedRequest(27482, 6955, 52, [46, 47])]


@pytest.mark.parametrize("line", ["", "[]", '{"input_length": 1}', '{"input_length": 0, "hash_ids": [1]}', "{"])
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_length": 1, "hash_ids": [1]}\n' + line + "\n")
    with pytest.raises(InputError, match=r"trace\.jsonl:2 is not allowed") as raised:
        read_trace(path, TracedRequest)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("field", ["timestamp", "input_length", "output_length", "hash_ids"])
def test_a_timed_trace_lacks_no_field(tmp_path: Path, field: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(TIMED + TIMED.replace(field, "other"))
    with pytest.raises(InputError, match=rf"trace\.jsonl:2 is not allowed .*{field}"):
        read_trace(path, TimedRequest)


def test_traces_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "plain.gz").write_text("{}")
    (tmp_path / "garbage.gz").write_bytes(gzip.compress(TIMED.encode())[:10] + b"\xff" * 20)
    cannot = [(name, "cannot be read") for name in ("none", "plain.gz", "garbage.gz")]
    for name, why in (*cannot, ("empty.jsonl", "no rows")):
        with pytest.raises(InputError, match=why):
            read_trace(tmp_path / name, TracedRequest)
