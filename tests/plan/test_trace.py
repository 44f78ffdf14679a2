"""Recorded traffic: what is read, and the line that is no request."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from pilotfish.errors import InputError
from pilotfish.plan.trace import TimedRequest, TracedRequest, read_trace

TIMED = '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}\n'


def test_a_timed_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(2 * TIMED)
    assert read_trace(path, TimedRequest) == 2 * [TimedRequest(27482, 6955, 52, [46, 47])]


UNTIMED = ("", "[]", '{"input_length": 1}', '{"input_length": 0, "hash_ids": [1]}', "{")
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
BAD = [*((TracedRequest, line) for line in UNTIMED), *((TimedRequest, TIMED.replace(one, "other")) for one in FIELDS)]


@pytest.mark.parametrize(("kind", "line"), BAD)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, kind: Any, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(TIMED + line + "\n")
    with pytest.raises(InputError, match=r"trace\.jsonl:2 is not allowed") as raised:
        read_trace(path, kind)
    assert "\n" not in str(raised.value)


def test_traces_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "plain.gz").write_text("{}")
    (tmp_path / "garbage.gz").write_bytes(gzip.compress(TIMED.encode())[:10] + b"\xff" * 20)
    cannot = [(name, "cannot be read") for name in ("none", "plain.gz", "garbage.gz")]
    for name, why in (*cannot, ("empty.jsonl", "no rows")):
        with pytest.raises(InputError, match=why):
            read_trace(tmp_path / name, TracedRequest)
