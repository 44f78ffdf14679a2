"""A server for as long as it takes. Longer than by default, and on other prompts:

SOAK_SECONDS=300 SOAK_STREAMS=64 SOAK_PROMPTS=FILE.jsonl make soak
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from server_load import Load, kills, memory, run_load, run_standstill
from support import SNIPPETS

from pilotfish.cli.bench.report import Row
from pilotfish.cli.bench.workload import Prompt, load_prompts
from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import Mode
from pilotfish.engine.pairs import resolve_pair

SECONDS, STREAMS = float(os.environ.get("SOAK_SECONDS", "30")), int(os.environ.get("SOAK_STREAMS", "16"))
#: Seconds of load from which on the growth of a process's memory says something.
WARMED_UP = 240.0


@pytest.fixture
def prompts() -> list[Prompt]:
    if path := os.environ.get("SOAK_PROMPTS"):
        return load_prompts(Path(path))
    return [Prompt(f"own/{index}", text) for index, text in enumerate(SNIPPETS)]


def config(mode: Mode) -> EngineConfig:
    pair = resolve_pair("pycode")
    draft = None if mode == "off" else pair.draft
    return EngineConfig(target=pair.target, draft=draft, mode=mode, dtype="float32", kv_slots=65536)


def show(row: Row) -> None:
    print(json.dumps(row))  # noqa: T201  # pytest shows it with -s, and if the test fails


def hold_up(config: EngineConfig, load: Load) -> None:
    """A server answers all of a load rightly, and holds nothing afterwards."""
    report = run_load(config, load, memory)
    show(report)
    assert report["broken"] == 0 < report["aborted"] and not any(report["held"].values())
    assert SECONDS < WARMED_UP or all(row["flat"] for row in report["memory"])


@pytest.mark.parametrize("mode", ["off", "sync", "async"])
def test_a_loaded_server_answers_as_an_idle_one(prompts: list[Prompt], mode: Mode) -> None:
    load = Load(prompts, SECONDS, STREAMS, requests=6 * STREAMS if STREAMS < 16 else 96, max_tokens=96)
    hold_up(config(mode), load)


@pytest.mark.parametrize("mode", ["off", "async"])
def test_tiers_of_kv_that_hold_less_than_is_asked_for(prompts: list[Prompt], mode: Mode, tmp_path: Path) -> None:
    """Each tier evicts all the time; files stay within their size, memory within its own."""
    disk = tmp_path / "kv"
    tiered = replace(config(mode), kv_slots=16384, kv_host_memory=0.05, kv_disk=disk, kv_disk_size=0.1)
    hold_up(tiered, Load(prompts, SECONDS, STREAMS, requests=6 * STREAMS, max_tokens=96))
    sizes = [path.stat().st_size for path in disk.rglob("*.kv")]
    assert 0.05 * (1 << 30) < sum(sizes) < 0.1 * (1 << 30) and not list(disk.rglob("*.tmp"))


@pytest.mark.parametrize("mode", ["off", "sync", "async"])
def test_a_target_that_stands_still(prompts: list[Prompt], mode: Mode) -> None:
    stops = run_standstill(config(mode), prompts, [1.0, 5.0, 13.0], STREAMS, max_tokens=1024)
    for stop in stops:
        show(stop)
    assert not any(stop["unequal"] or stop["broken"] or stop["restarts"] for stop in stops)
    assert [stop["told_after"] is None for stop in stops] == [True, False, False]


@pytest.mark.parametrize("mode", ["off", "async"])
def test_targets_that_are_killed_under_load(prompts: list[Prompt], mode: Mode) -> None:
    """Zero failed, zero unequal, whatever kind of request was under way."""
    load = Load(prompts, 3 * SECONDS, 2 * STREAMS, requests=96, max_tokens=96)  # all clients end one between kills
    paced = replace(config(mode), pace="target=10ms")
    report = run_load(paced, load, kills(2, pause=1.0), ["--replicas=2"])
    show(report)
    assert report["broken"] == 0 and not any(report["held"].values())
    assert report["kills"] >= 2 and report["resumed"] > 0
