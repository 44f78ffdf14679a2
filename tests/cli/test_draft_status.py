"""`pilotfish draft-status`: pools of a server, as tables and JSON; refusals in one line."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from conftest import Run

from pilotfish.server.observe.draft_pools import DraftPools, KnownPool
from pilotfish.wire.serving import PoolLoad

EAST = PoolLoad(
    name="east",
    ready=True,
    sessions=9,
    free_slots=50,
    step_ms=4.0,
    queue_ms=0.5,
    drops={"late_nodes": 25, "gaps": 2, "repeated_nodes": 4, "dropped_nodes": 1},
    revision="monday\x1b[31m",
    model="ngram",
    capabilities=["feedback", "errors"],
    own_sessions=3,
    slots=640,
    delay_ms=0.25,
    trees=12,
    nodes=100,
    verified=40,
    accepted=30,
)
WEST = PoolLoad("west", False, 0, 7, 0.0, 0.0, refusal="another tokenizer")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "drafts.json"
    path.write_bytes(msgspec.json.encode(DraftPools([KnownPool("target 0", EAST), KnownPool("target 1", WEST)])))
    return path


def test_tables(pilotfish: Run, file: Path) -> None:
    told = pilotfish("draft-status", "--from", str(file))
    assert told.code == 0 and "\x1b" not in told.stdout
    for words in (
        "ngram monday\\x1b[31m",
        "3 of 9",
        "50 of 640",
        "0.25",
        "25.0 %",
        "75.0 %",
        "gaps 2, dropped_nodes 1",
        "feedback, errors",
        "refuses: another tokenizer",
    ):
        assert words in told.stdout, words
    assert "repeated_nodes" not in told.stdout


def test_json(pilotfish: Run, file: Path) -> None:
    told = json.loads(pilotfish("draft-status", "--from", str(file), "--json").stdout)
    assert told["object"] == "list" and [one["target"] for one in told["data"]] == ["target 0", "target 1"]
    assert msgspec.convert(told["data"][0]["pool"], PoolLoad) == msgspec.convert(msgspec.to_builtins(EAST), PoolLoad)


def test_no_pools(pilotfish: Run, tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    path.write_text('{"data": [], "object": "list"}')
    assert "does not run with --mode async" in pilotfish("draft-status", "--from", str(path)).stdout


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--url", "ftp://x"], "url"),
        (["--url", "http://127.0.0.1:9"], "cannot be reached"),
        (["--from", "/nowhere"], "cannot be read"),
        (["--from", "/dev/null"], "holds no such statistics"),
        (["--from", "/dev/null", "--url", "http://x"], "cannot be combined"),
        (["--api-key-env", "NO_SUCH_KEY"], "api_key_env"),
    ],
)
def test_what_cannot_be(pilotfish: Run, options: list[str], reason: str) -> None:
    told = pilotfish("draft-status", *options)
    assert told.code == 2 and reason in told.stderr and told.stderr.count("\n") == 1


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
