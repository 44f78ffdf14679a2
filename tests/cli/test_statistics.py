"""Commands about a server's statistics: where these come from, what people, programs and pages get, what is refused."""

import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from command_runs import Refused, Run
from explained_traffic import HOUR, Traffic, counted
from scripted_server import ScriptedServer, plain

from pilotfish.cli.rollout.explain import span_of
from pilotfish.errors import ParameterError
from pilotfish.operate.arms import RolloutArms
from pilotfish.operate.outcome import Cohort, RequestOutcome
from pilotfish.server.observe.fleet_metrics import DraftPools, KnownPool
from pilotfish.wire.serving import PoolLoad

NOW = 1_800_000_000.0
EXPLAIN = ("explain", "--before", "2h..1h", "--after", "1h..now")
REPORT = ("rollout", "report")
#: A draft, and a variant, whose names no terminal and no page should obey.
BAD = "r2\x1b[31m"
EVIL = '<script>alert("x")</script>\x1b[31m[bold]&'
NAMES = ["off", "next", "slow", EVIL]
DROPS = {"late_nodes": 25, "gaps": 2, "repeated_nodes": 4, "dropped_nodes": 1}
COUNTS = {"own_sessions": 3, "slots": 640, "delay_ms": 0.25, "trees": 12, "nodes": 100, "verified": 40, "accepted": 30}
ABOUT: dict[str, Any] = {"model": "ngram", "revision": "monday\x1b[31m", "capabilities": ["feedback", "errors"]}
EAST = PoolLoad("east", True, 9, 50, 4.0, 0.5, drops=DROPS, **ABOUT, **COUNTS)
WEST = PoolLoad("west", False, 0, 7, 0.0, 0.0, refusal="another tokenizer")


@pytest.fixture(scope="module")
def traffic() -> bytes:
    """The statistics of a server whose draft BAD went bad an hour ago."""
    before = Traffic(shares={"draft": {"r1": 0.7, BAD: 0.3}})
    after = replace(before, ease={("draft", BAD): 0.7})
    outcomes = [*before.outcomes(0, NOW - 2 * HOUR), *after.outcomes(1, NOW - HOUR)]
    return msgspec.json.encode(counted(outcomes).told(NOW))


def arms(holdout: str = "off", seed: int = 3, requests: int = 2400) -> bytes:
    random, made = np.random.default_rng(seed), RolloutArms(holdout=holdout, since=1_764_000_000.0)
    for number in range(requests):
        name = NAMES[number % len(NAMES)]
        itl = 0.02 * {"next": 0.7, "slow": 1.4}.get(name, 1.0) * float(np.exp(0.3 * random.standard_normal()))
        known: dict[str, Any] = {"ended": made.since + number, "itl": itl, "latency": 2.0, "tokens": 90, "steps": 40}
        made.add(RequestOutcome(variant=name, cohort=Cohort(), **known))
    return msgspec.json.encode({"guard": {}, **msgspec.to_builtins(made)})


@pytest.fixture
def explained(tmp_path: Path, traffic: bytes) -> Path:
    path = tmp_path / "statistics.json"
    path.write_bytes(traffic)
    return path


@pytest.fixture(scope="module")
def rolled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rollout") / "rollout.json"
    path.write_bytes(arms())
    return path


# -- where statistics come from


@pytest.mark.parametrize("command", [EXPLAIN, REPORT, ("draft-status",)], ids=lambda command: command[0])
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--url", "http://127.0.0.1:9"), "url: http://127.0.0.1:9 cannot be reached: Connection refused"),
        (("--url", "http://127.0.0.1:99999"), "cannot be reached"),
        (("--url", "ftp://x"), "url: 'ftp://x' is not allowed; expected an http:// or https:// URL"),
        (("--url", "http://[x"), "an http:// or https:// URL"),
        (("--from", "/nowhere"), "from: '/nowhere' is not allowed; expected a file that can be read (No such file"),
        (("--from", "/dev/null"), "/dev/null holds no such statistics"),
        (("--from", "/dev/null", "--url", "http://x"), "from: it cannot be combined with --url"),
        (("--api-key-env", "NO_SUCH_KEY"), "api_key_env: 'NO_SUCH_KEY'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_unusable_sources(refused: Refused, command: tuple[str, ...], options: tuple[str, ...], why: str) -> None:
    assert why in refused(*command, *options)


def test_servers_and_files_say_the_same(
    pilotfish: Run, refused: Refused, rolled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (from_file,) = pilotfish(*REPORT, "--from", rolled, "--json").rows
    monkeypatch.setenv("ROLLOUT_KEY", "secret")
    with ScriptedServer(route=b" /v1/rollout ", got=plain("200 OK", rolled.read_bytes())) as server:
        for suffix in ("", "/", "/v1"):
            asked = pilotfish(*REPORT, "--url", server.url + suffix, "--api-key-env", "ROLLOUT_KEY", "--json")
            assert asked.rows == [from_file]
    assert all(b"uthorization: Bearer secret" in head for head in server.heads)
    for answer, why in (
        (plain("401 Unauthorized", b"{}"), "HTTP 401; --api-key-env"),
        (plain("404 Not Found", b"{}"), "HTTP 404; this server keeps no such"),
        (plain("200 OK", b"<html>"), "holds no such statistics"),
    ):
        with ScriptedServer(route=b" /v1/rollout ", got=answer) as server:
            assert why in refused(*REPORT, "--url", server.url)


def test_what_holds_no_statistics(refused: Refused, tmp_path: Path) -> None:
    for body in (b"", b"[]", b"{}", b'{"now": 1, "windows": [{"begin": 1, "cells": [{}]}]}', b"\xff"):
        (tmp_path / "bad.json").write_bytes(body)
        assert str(tmp_path / "bad.json") in refused(*EXPLAIN, "--from", tmp_path / "bad.json")


def test_pages_that_cannot_be_written(pilotfish: Run, explained: Path, rolled: Path, tmp_path: Path) -> None:
    for command, file in ((EXPLAIN, explained), (REPORT, rolled)):
        result = pilotfish(*command, "--from", file, "--json", "--html", tmp_path / "no" / "page.html")
        assert result.code == 2 and result.stderr.count("\n") == 1
        assert "html: " in result.stderr and "a file that can be written" in result.stderr and result.rows


# -- explain


def test_a_person_reads_what_changed_and_what_to_do(pilotfish: Run, explained: Path) -> None:
    result = pilotfish(*EXPLAIN, "--from", explained)
    assert (result.code, result.stderr) == (0, "")
    text = " ".join(result.stdout.split())
    assert text.startswith("Acceptance fell by")
    assert re.search(r"1\. draft \(draft r2\\x1b\[31m\): -0\.\d\d accepted tokens a step, \d+% of the change", text)
    assert "What to do: Take this revision out of its variant" in text
    assert re.search(r"draft [+-]0\.\d{3} [+-]0\.\d{3} [+-]0\.\d{3}", text)
    assert "\x1b" not in result.stdout


def test_causes_as_json_and_as_a_page_with_two_plots(pilotfish: Run, explained: Path, tmp_path: Path) -> None:
    result = pilotfish(*EXPLAIN, "--from", explained, "--html", tmp_path / "why.html", "--json")
    (record,) = result.rows
    assert result.stderr == "" and record["verdict"] == "changed"
    assert (record["causes"][0]["kind"], record["causes"][0]["values"]) == ("draft", [BAD])
    page = (tmp_path / "why.html").read_text()
    assert page.startswith("<!doctype html>") and "draft (draft r2\\x1b[31m): -0." in page and "\x1b" not in page
    assert page.count("<svg") == 2 and "<script" not in page


def test_without_a_change_or_traffic_it_says_so(pilotfish: Run, explained: Path, tmp_path: Path) -> None:
    halves = ("--before", "2h..90m", "--after", "90m..1h")
    assert pilotfish("explain", "--from", explained, *halves, "--html", tmp_path / "why.html").code == 0
    page = (tmp_path / "why.html").read_text()
    assert "Not enough data" in page and page.count("<svg") == 1
    none = pilotfish("explain", "--from", explained, "--before", "9d..8d", "--after", "1h..now")
    assert none.code == 0 and none.stdout.startswith("Not enough data") and none.stdout.count("\n") == 1


def test_intervals() -> None:
    for text, begin, end in (
        ("2h..90m", NOW - 7200, NOW - 5400),
        ("1.5d..30s", NOW - 129_600, NOW - 30),
        ("2020-01-01T00:00+00:00..now", 1_577_836_800, NOW),
        ("2020-01-01..2020-01-02", datetime(2020, 1, 1).timestamp(), datetime(2020, 1, 2).timestamp()),
    ):
        assert span_of("before", text, NOW) == (begin, end)


def test_what_is_no_interval(refused: Refused, explained: Path) -> None:
    for text in ("", "2h", "..", "1h..2h", "1h..1h", "now..now", "2h...1h", "2w..now", "2020-13-01..now", "²h..now"):
        with pytest.raises(ParameterError, match=r"^before: .*BEGIN\.\.END"):
            span_of("before", text, NOW)
    line = refused("explain", "--from", explained, "--before=-2h..now", "--after", "1h..now")
    assert line.startswith("before: ") and "BEGIN..END" in line


# -- rollout report


def findings(record: dict[str, Any], measure: str = "itl") -> dict[str, str]:
    return {row["variant"]: row["finding"] for row in record["rows"] if row["measure"] == measure}


def test_a_report_for_people(pilotfish: Run, rolled: Path) -> None:
    result = pilotfish(*REPORT, "--from", rolled)
    assert (result.code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Since 2025-11-24 16:00:00+00:00; the holdout is off; alpha 0.05, 0.0167 of each")
    variants = ("off", "next", "slow")
    itl = {name: next(one for one in lines if one.startswith("ITL  ") and f" {name} " in one) for name in variants}
    assert "faster by " in itl["next"] and "slower by " in itl["slow"] and "by" not in itl["off"]
    assert any(line.startswith("tokens per step, secondary") and "no difference seen" in line for line in lines)
    assert "TTFT" not in result.stdout.replace("TTFT of", "")  # nobody had one
    assert "\x1b" not in result.stdout and "\\x1b[31m[bold]&" in result.stdout


def test_a_report_as_json(pilotfish: Run, rolled: Path) -> None:
    result = pilotfish(*REPORT, "--from", rolled, "--json", "--alpha", 0.3)
    (record,) = result.rows
    assert (result.code, result.stderr) == (0, "") and record["holdout"] == "off"
    assert (record["alpha"], record["interval_alpha"]) == (0.3, pytest.approx(0.1))
    assert findings(record)["next"].startswith("faster by ") and findings(record)["off"] == ""
    (row,) = [row for row in record["rows"] if (row["variant"], row["measure"]) == ("slow", "itl")]
    assert row["difference"]["low"] < 0.4 < row["difference"]["high"] and row["better"] is False


def test_several_sources_are_one(pilotfish: Run, refused: Refused, rolled: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_bytes(arms(seed=4, requests=400))
    (record,) = pilotfish(*REPORT, "--from", rolled, "--from", other, "--json").rows
    assert {one["variant"]: one["requests"] for one in record["variants"]} == dict.fromkeys(NAMES, 700)
    other.write_bytes(arms(holdout="next", requests=8))
    assert "'off' and 'next' cannot be" in refused(*REPORT, "--from", rolled, "--from", other)


def test_reports_that_cannot_be(refused: Refused, rolled: Path, tmp_path: Path) -> None:
    for body, why in (
        ('{"holdout": "off", "since": 0, "arms": {}}', "no request has ended yet"),
        ("{}", "missing required field `holdout`"),
        ('{"holdout": "off", "since": 0, "arms": {"a": {"requests": -3}}}', "Expected `int` >= 0"),
    ):
        (tmp_path / "bad.json").write_text(body)
        assert why in refused(*REPORT, "--from", tmp_path / "bad.json")
    for alpha in (0, 1, -2, "nan"):
        assert "a number between 0 and 1" in refused(*REPORT, "--from", rolled, "--alpha", alpha)


def test_the_page_is_one_file_and_draws_each_measure(pilotfish: Run, rolled: Path, tmp_path: Path) -> None:
    assert pilotfish(*REPORT, "--from", rolled, "--html", tmp_path / "report.html").code == 0
    page = (tmp_path / "report.html").read_text()
    assert not any(words in page for words in ("<script", "src=", "href=", "url("))
    assert page.count("<svg") == 4  # ITL, tokens/s, tokens per step, failed requests
    assert all(f'class="{name}"' in page for name in ("dot hit", "dot miss", "dot plain", "line hit", "line miss"))
    assert "faster by " in page and "How to read it" in page and "ITL</h3>" in page and "(secondary)" in page


def test_the_page_has_no_chart_without_a_difference(pilotfish: Run, tmp_path: Path) -> None:
    few, html = tmp_path / "few.json", tmp_path / "report.html"
    few.write_bytes(arms(requests=20))
    assert pilotfish(*REPORT, "--from", few, "--html", html).code == 0
    assert "<svg" not in html.read_text() and "not enough requests yet" in html.read_text()


# -- draft-status


def test_pools_as_tables_and_as_json(pilotfish: Run, tmp_path: Path) -> None:
    path = tmp_path / "drafts.json"
    path.write_bytes(msgspec.json.encode(DraftPools([KnownPool("target 0", EAST), KnownPool("target 1", WEST)])))
    shown = pilotfish("draft-status", "--from", path)
    assert shown.code == 0 and "\x1b" not in shown.stdout and "repeated_nodes" not in shown.stdout
    for words in (
        *("ngram monday\\x1b[31m", "3 of 9", "50 of 640", "0.25", "25.0 %", "75.0 %", "gaps 2, dropped_nodes 1"),
        *("feedback, errors", "refuses: another tokenizer"),
    ):
        assert words in shown.stdout, words
    (told,) = pilotfish("draft-status", "--from", path, "--json").rows
    assert told["object"] == "list" and [one["target"] for one in told["data"]] == ["target 0", "target 1"]
    assert msgspec.convert(told["data"][0]["pool"], PoolLoad) == msgspec.convert(msgspec.to_builtins(EAST), PoolLoad)
    path.write_text('{"data": [], "object": "list"}')
    assert "does not run with --mode async" in pilotfish("draft-status", "--from", path).stdout


@pytest.mark.parametrize(
    ("pool", "state"),
    [
        (EAST, "ready"),
        (WEST, "refuses"),
        (msgspec.structs.replace(WEST, refusal=None), "silent"),
        (msgspec.structs.replace(EAST, busy=True), "busy"),
    ],
)
def test_states(pool: PoolLoad, state: str) -> None:
    known = KnownPool("target", pool)
    assert known.state == state
    assert (known.acceptance is None) == (known.lateness is None) == (pool.nodes == 0)
