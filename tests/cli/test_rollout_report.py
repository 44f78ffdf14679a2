"""`pilotfish rollout report`: from a server, from files, for people, programs and as a page; what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from conftest import Run

from pilotfish.operate.arms import RolloutArms
from pilotfish.operate.outcome import Cohort, RequestOutcome

EVIL = '<script>alert("x")</script>\x1b[31m[bold]&'
NAMES = ["off", "next", "slow", EVIL]
RATIOS = {"next": 0.7, "slow": 1.4}


def arms(holdout: str = "off", seed: int = 3, requests: int = 2400) -> RolloutArms:
    random, made = np.random.default_rng(seed), RolloutArms(holdout=holdout, since=1_764_000_000.0)
    for number in range(requests):
        name = NAMES[number % len(NAMES)]
        itl = 0.02 * RATIOS.get(name, 1.0) * float(np.exp(0.3 * random.standard_normal()))
        known: dict[str, Any] = {"ended": made.since + number, "itl": itl, "latency": 2.0, "tokens": 90, "steps": 40}
        made.add(RequestOutcome(variant=name, cohort=Cohort(), **known))
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rollout.json"
    path.write_bytes(msgspec.json.encode({"guard": {}, **msgspec.to_builtins(arms())}))
    return path


Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server with one answer for whoever has the key; its URL."""
    servers: list[HTTPServer] = []

    def start(body: bytes, status: int = 200, key: str = "") -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = not key or self.headers["authorization"] == f"Bearer {key}"
                self.send_response((status if self.path == "/v1/rollout" else 404) if known else 401)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def findings(record: dict[str, Any], measure: str = "itl") -> dict[str, str]:
    return {row["variant"]: row["finding"] for row in record["rows"] if row["measure"] == measure}


def test_a_report_for_people(pilotfish: Run, file: Path) -> None:
    result = pilotfish("rollout", "report", "--from", file)
    assert (result.code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Since 2025-11-24 16:00:00+00:00; the holdout is off; alpha 0.05, 0.0167 of each")
    itl = {variant: next(one for one in lines if one.startswith("ITL  ") and f" {variant} " in one)
           for variant in ("off", "next", "slow")}  # fmt: skip
    assert "faster by " in itl["next"] and "slower by " in itl["slow"] and "by" not in itl["off"]
    assert any(line.startswith("tokens per step, secondary") and "no difference seen" in line for line in lines)
    assert "TTFT" not in result.stdout.replace("TTFT of", "")  # nobody had one


def test_names_are_no_commands_of_a_terminal(pilotfish: Run, file: Path) -> None:
    stdout = pilotfish("rollout", "report", "--from", file).stdout
    assert "\x1b" not in stdout and "\\x1b[31m[bold]&" in stdout


def test_a_report_as_json(pilotfish: Run, file: Path) -> None:
    result = pilotfish("rollout", "report", "--from", file, "--json", "--alpha", 0.3)
    (record,) = result.rows
    assert (result.code, result.stderr) == (0, "") and record["holdout"] == "off"
    assert (record["alpha"], record["interval_alpha"]) == (0.3, pytest.approx(0.1))
    assert findings(record)["next"].startswith("faster by ") and findings(record)["off"] == ""
    (row,) = [row for row in record["rows"] if (row["variant"], row["measure"]) == ("slow", "itl")]
    assert row["difference"]["low"] < 0.4 < row["difference"]["high"] and row["better"] is False


def test_servers_and_files_say_the_same(pilotfish: Run, file: Path, serve: Serve) -> None:
    (from_file,) = pilotfish("rollout", "report", "--from", file, "--json").rows
    for suffix in ("", "/", "/v1"):
        (from_server,) = pilotfish("rollout", "report", "--url", serve(file.read_bytes()) + suffix, "--json").rows
        assert from_server == from_file


def test_several_sources_are_one(pilotfish: Run, file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_bytes(msgspec.json.encode(arms(seed=4, requests=400)))
    (record,) = pilotfish("rollout", "report", "--from", file, "--from", other, "--json").rows
    assert {one["variant"]: one["requests"] for one in record["variants"]} == dict.fromkeys(NAMES, 700)


def test_a_server_that_wants_a_key(pilotfish: Run, file: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    url = serve(file.read_bytes(), key="secret")
    refused = pilotfish("rollout", "report", "--url", url)
    assert refused.code == 2 and "HTTP 401" in refused.stderr and "--api-key-env" in refused.stderr
    monkeypatch.setenv("ROLLOUT_KEY", "secret")
    assert pilotfish("rollout", "report", "--url", url, "--api-key-env", "ROLLOUT_KEY").code == 0
    missing = pilotfish("rollout", "report", "--url", url, "--api-key-env", "NO_SUCH_KEY")
    assert missing.code == 2 and "NO_SUCH_KEY" in missing.stderr


def one_line_of_2(pilotfish: Run, *arguments: object) -> str:
    result = pilotfish("rollout", "report", *arguments)
    assert (result.code, result.stdout) == (2, "") and result.stderr.count("\n") == 1, result
    return result.stderr


def test_servers_that_give_no_statistics(pilotfish: Run, serve: Serve) -> None:
    assert "cannot be reached: Connection refused" in one_line_of_2(pilotfish, "--url", "http://127.0.0.1:9")
    assert "HTTP 404; this server keeps no such" in one_line_of_2(pilotfish, "--url", serve(b"{}", 404))
    assert "holds no such statistics" in one_line_of_2(pilotfish, "--url", serve(b"<html>"))
    assert "an http:// or https:// URL" in one_line_of_2(pilotfish, "--url", "ftp://x")
    assert "an http:// or https:// URL" in one_line_of_2(pilotfish, "--url", "http://[x")
    assert "cannot be reached" in one_line_of_2(pilotfish, "--url", "http://127.0.0.1:99999")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ('{"holdout": "off", "since": 0, "arms": {}}', "no request has ended yet"),
        ("{}", "missing required field `holdout`"),
        ("no json", "holds no such statistics"),
        ('{"holdout": "off", "since": 0, "arms": {"a": {"requests": -3}}}', "Expected `int` >= 0"),
    ],
)
def test_files_that_hold_no_statistics(pilotfish: Run, tmp_path: Path, body: str, why: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(body)
    assert why in one_line_of_2(pilotfish, "--from", path)


def test_bad_usage(pilotfish: Run, file: Path, tmp_path: Path) -> None:
    assert "cannot be read: No such file" in one_line_of_2(pilotfish, "--from", tmp_path / "none.json")
    assert "cannot be combined with --url" in one_line_of_2(pilotfish, "--from", file, "--url", "http://x")
    for alpha in (0, 1, -2, "nan"):
        assert "a number between 0 and 1" in one_line_of_2(pilotfish, "--from", file, "--alpha", alpha)
    other = tmp_path / "other.json"
    other.write_bytes(msgspec.json.encode(arms(holdout="next")))
    assert "'off' and 'next' cannot be" in one_line_of_2(pilotfish, "--from", file, "--from", other)


class Page(HTMLParser):
    """Every element is closed where it should be; remembers tags and classes of drawings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.drawn: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if "svg" in self.open:
            self.drawn += [value or "" for name, value in attrs if name == "class"]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_file_and_draws_each_measure(pilotfish: Run, file: Path, tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    assert pilotfish("rollout", "report", "--from", file, "--html", html).code == 0
    text = html.read_text()
    page = Page(text)
    assert "script" not in page.tags and page.links == [] and "url(" not in text
    assert page.tags.count("svg") == 4  # ITL, tokens/s, tokens per step, failed requests
    assert {"dot hit", "dot miss", "dot plain", "line hit", "line miss"} <= set(page.drawn)
    assert "faster by " in text and "How to read it" in text and "ITL</h3>" in text and "(secondary)" in text


def test_the_page_has_no_chart_without_a_difference(pilotfish: Run, tmp_path: Path) -> None:
    few, html = tmp_path / "few.json", tmp_path / "report.html"
    few.write_bytes(msgspec.json.encode(arms(requests=20)))
    assert pilotfish("rollout", "report", "--from", few, "--html", html).code == 0
    page = Page(html.read_text())
    assert "svg" not in page.tags and "not enough requests yet" in html.read_text()


def test_a_page_that_cannot_be_written(pilotfish: Run, file: Path, tmp_path: Path) -> None:
    result = pilotfish("rollout", "report", "--from", file, "--json", "--html", tmp_path / "no" / "report.html")
    assert result.code == 2 and "a file that can be written" in result.stderr
    assert json.loads(result.stdout)["holdout"] == "off"
