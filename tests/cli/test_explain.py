"""`pilotfish explain`: from a file or a server to a cause, as text, JSON and a page; refusals in one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import msgspec
import pytest
from conftest import Run
from explained_traffic import HOUR, Traffic, counted

from pilotfish.cli.rollout.explain import span_of

NOW = 1_800_000_000.0
INTERVALS = ("--before", "2h..1h", "--after", "1h..now")


#: A draft whose name no terminal should obey.
BAD = "r2\x1b[31m"


@pytest.fixture(scope="module")
def answer() -> bytes:
    """Of a server whose draft BAD went bad an hour ago."""
    before = Traffic(shares={"draft": {"r1": 0.7, BAD: 0.3}})
    after = replace(before, ease={("draft", BAD): 0.7})
    outcomes = [*before.outcomes(0, NOW - 2 * HOUR), *after.outcomes(1, NOW - HOUR)]
    return msgspec.json.encode(counted(outcomes).told(NOW))


@pytest.fixture
def file(tmp_path: Path, answer: bytes) -> Path:
    path = tmp_path / "statistics.json"
    path.write_bytes(answer)
    return path


@pytest.fixture
def url(answer: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        """Answers whoever has the key."""

        def do_GET(self) -> None:
            known = self.headers["authorization"] == "Bearer secret" and self.path == "/v1/rollout/statistics"
            self.send_response(200 if known else 401)
            self.end_headers()
            self.wfile.write(answer if known else b"")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_person_reads_what_changed_and_what_to_do(pilotfish: Run, file: Path) -> None:
    result = pilotfish("explain", "--from", file, *INTERVALS)
    assert (result.code, result.stderr) == (0, "")
    text = " ".join(result.stdout.split())
    assert text.startswith("Acceptance fell by")
    assert re.search(r"1\. draft \(draft r2\\x1b\[31m\): -0\.\d\d accepted tokens a step, \d+% of the change", text)
    assert "What to do: Take this revision out of its variant" in text
    assert re.search(r"draft [+-]0\.\d{3} [+-]0\.\d{3} [+-]0\.\d{3}", text)
    assert "\x1b" not in result.stdout


def test_json_is_all_of_stdout(pilotfish: Run, file: Path) -> None:
    result = pilotfish("explain", "--from", file, *INTERVALS, "--json")
    (record,) = result.rows
    assert result.stderr == "" and record["verdict"] == "changed"
    assert (record["causes"][0]["kind"], record["causes"][0]["values"]) == ("draft", [BAD])


def test_a_server_is_asked_with_a_key(pilotfish: Run, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_KEY", "secret")
    result = pilotfish("explain", "--url", url, "--api-key-env", "LLM_KEY", *INTERVALS, "--json")
    assert result.rows[0]["causes"][0]["kind"] == "draft"


def test_a_server_that_refuses_is_one_line(pilotfish: Run, url: str) -> None:
    result = pilotfish("explain", "--url", url, *INTERVALS)
    assert result.code == 2 and result.stderr.count("\n") == 1 and "HTTP 401" in result.stderr


def test_a_page_has_the_causes_and_two_plots(pilotfish: Run, file: Path, tmp_path: Path) -> None:
    assert pilotfish("explain", "--from", file, *INTERVALS, "--html", tmp_path / "why.html", "--json").code == 0
    page = (tmp_path / "why.html").read_text()
    assert page.startswith("<!doctype html>") and "draft (draft r2\\x1b[31m): -0." in page and "\x1b" not in page
    assert page.count("<svg") == 2 and "<script" not in page


def test_a_page_without_a_change_says_so(pilotfish: Run, file: Path, tmp_path: Path) -> None:
    halves = ("--before", "2h..90m", "--after", "90m..1h")
    assert pilotfish("explain", "--from", file, *halves, "--html", tmp_path / "why.html").code == 0
    page = (tmp_path / "why.html").read_text()
    assert "Not enough data" in page and page.count("<svg") == 1


def test_no_traffic_is_no_error(pilotfish: Run, file: Path) -> None:
    result = pilotfish("explain", "--from", file, "--before", "9d..8d", "--after", "1h..now")
    assert result.code == 0 and result.stdout.startswith("Not enough data") and result.stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "begin", "end"),
    [
        ("2h..90m", NOW - 7200, NOW - 5400),
        ("1.5d..30s", NOW - 129_600, NOW - 30),
        ("2020-01-01T00:00+00:00..now", 1_577_836_800, NOW),
        (
            "2020-01-01..2020-01-02T12:30",
            datetime(2020, 1, 1).timestamp(),
            datetime(2020, 1, 2, 12, 30).timestamp(),
        ),
    ],
)
def test_intervals(text: str, begin: float, end: float) -> None:
    span = span_of("before", text, NOW)
    assert (span.begin, span.end) == (begin, end)


@pytest.mark.parametrize(
    "text",
    ["", "2h", "..", "1h..2h", "1h..1h", "now..now", "2h...1h", "2w..now", "2020-13-01..now", "-2h..now", "²h..now"],
)
def test_what_is_no_interval_is_one_line(pilotfish: Run, file: Path, text: str) -> None:
    result = pilotfish("explain", "--from", file, f"--before={text}", "--after", "1h..now")
    assert result.code == 2 and result.stdout == "" and result.stderr.count("\n") == 1
    assert result.stderr.startswith("pilotfish: before: ") and "BEGIN..END" in result.stderr


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"now": 1, "windows": [{"begin": 1, "cells": [{}]}]}', b"\xff"])
def test_what_holds_no_statistics_is_one_line(pilotfish: Run, file: Path, body: bytes) -> None:
    file.write_bytes(body)
    result = pilotfish("explain", "--from", file, *INTERVALS)
    assert result.code == 2 and result.stdout == "" and result.stderr.count("\n") == 1 and str(file) in result.stderr


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--from", "/nowhere.json"), "/nowhere.json"),
        (("--url", "http://127.0.0.1:1"), "url: http://127.0.0.1:1 cannot be reached"),
        (("--url", "ftp://somewhere"), "url: 'ftp://somewhere'"),
        (("--url", "http://127.0.0.1:1", "--from", "x.json"), "from: it cannot be combined with --url"),
    ],
)
def test_sources_that_cannot_be_used_are_one_line(pilotfish: Run, options: tuple[str, ...], named: str) -> None:
    result = pilotfish("explain", *options, *INTERVALS)
    assert result.code == 2 and result.stdout == "" and result.stderr.count("\n") == 1 and named in result.stderr


def test_a_page_that_cannot_be_written_is_one_line(pilotfish: Run, file: Path, tmp_path: Path) -> None:
    result = pilotfish("explain", "--from", file, *INTERVALS, "--html", tmp_path / "no" / "why.html")
    assert result.code == 2 and result.stderr.count("\n") == 1 and "html: " in result.stderr


def test_it_runs_without_torch(file: Path) -> None:
    command = json.dumps(["explain", "--from", str(file), *INTERVALS, "--json"])
    code = (
        f"import sys; from pilotfish.cli import main; code = main({command}); sys.exit(code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
