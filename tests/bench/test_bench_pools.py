"""The benches of draft pools, on a tiny pair in processes of its own; no test says how fast. tests/soak has the one of
sharing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import Invoke, Measure
from support import make_engine
from typer.testing import CliRunner

from pilotfish.bench import app, programs
from pilotfish.bench.contestants import OFF, Run
from pilotfish.bench.pools import EndlessStreams, Window, distances_of, phase_of, run_stall
from pilotfish.bench.programs import Program, start_pool
from pilotfish.bench.report import Spread
from pilotfish.bench.sharing import (
    KILL_PHASES,
    Kill,
    Reading,
    failover_of,
    groups_of,
    run_sharing,
    sharing_of,
    write_keys,
)
from pilotfish.bench.workload import Prompt, Workload, parse_milliseconds
from pilotfish.config.engine import EngineConfig
from pilotfish.core.scheduling.request import RequestStats
from pilotfish.errors import EngineError, InputError, ParameterError
from pilotfish.wire.curve_keys import load_pool_keys, load_target_keys
from pilotfish.workers.records import StepRecord

PACED = {"pace": "target=4ms,draft=1ms", "budget": "fixed"}


# -- network


@pytest.fixture(scope="module")
def pool(llama: Path, draft: Path) -> Iterator[Program]:
    """A pool for several benches."""
    config = EngineConfig(target=llama, draft=draft, dtype="float32", kv_slots=4096, pace=PACED["pace"])
    with start_pool(config, frozenset([max(os.sched_getaffinity(0))])) as started:
        yield started


@pytest.fixture
def _one_pool(pool: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "start_pool", lambda *_: nullcontext(pool))


@pytest.mark.usefixtures("_one_pool")
def test_network(invoke: Invoke) -> None:
    sizes = ("--round-trips", "0,2", "--repeats", "2", "--max-tokens", "24")
    report = invoke("network", *sizes, "--pace", PACED["pace"], "--budget", "fixed")
    off, near, far = report["distances"]
    assert [row["contestant"] for row in report["distances"]] == ["off", "0 ms", "2 ms"]
    assert off["hit_share"] == 0 and off["tokens_per_verify_step"] == 1
    assert near["hit_share"] > 0 and near["tokens_per_verify_step"] > 1  # the draft serves through the proxy
    assert all(row["equal_outputs"] == 1 and row["tokens_per_second"]["count"] == 2 for row in (off, near, far))
    assert off["over_off"]["median"] == 1 and near["over_nearest"]["median"] == 1
    assert report["level_ms"] >= 1 and report["holds"] == (
        min(near["over_off"]["median"], far["over_off"]["median"]) >= 0.98
    )


def runs(*seconds: float) -> list[Run]:
    """Of 12 tokens each."""
    return [Run(one, [[1] * 12], [RequestStats(verify_steps=4, hits=1)]) for one in seconds]


def test_distances_are_compared_round_by_round() -> None:
    rounds = {OFF: runs(2, 4, 1), "0 ms": runs(1, 2, 2), "5 ms": runs(2, 4, 4)}
    rounds["5 ms"][0].outputs[0][3] = 7
    results = distances_of(rounds)
    off, near, far = results["distances"]
    assert near["over_off"] == Spread.of([2.0, 2.0, 0.5]) and far["over_off"] == Spread.of([1.0, 1.0, 0.25])
    assert (
        far["over_nearest"] == Spread.of([0.5, 0.5, 0.5]) and near["over_nearest"].median == off["over_off"].median == 1
    )
    assert (far["tokens_per_verify_step"], far["hit_share"]) == (3, 0.25)
    assert (near["equal_outputs"], far["equal_outputs"]) == (1, pytest.approx(2 / 3))
    assert [bar["round_trip"] for bar in results["bars"] if "┃" in bar["bar"]] == ["off", "0 ms", "5 ms"]
    assert results["holds"]
    assert not distances_of({**rounds, "9 ms": runs(4, 8, 2)})["holds"]


@pytest.mark.parametrize("text", ["", "1,0", "1,1", "-1", "x", "1,,2", "20000", "nan"])
def test_round_trips_ascend(text: str) -> None:
    assert parse_milliseconds("round_trips", "0,0.5,50") == [0, 0.5, 50]
    with pytest.raises(ParameterError, match="round_trips"):
        parse_milliseconds("round_trips", text)


# -- sharing


def test_rows_are_those_between_two_readings() -> None:
    readings = [Reading(10, [1000, 700], [5, 1], 2.0), Reading(12, [4000, 1700], [105, 41], 2.0)]
    readings.append(Reading(13, [5500, 2200], [150, 61], level_ms=2.0))
    sharing = sharing_of(readings, [3, 1], leaves=4)
    heavy, light = sharing["tenants"]
    assert heavy["rows_per_second"] == Spread.of([1500, 1500]) and light["rows_per_second"] == Spread.of([500, 500])
    assert heavy["rows_to_last"] == Spread.of([3, 3]) and light["rows_to_last"] == Spread.of([1, 1])
    assert heavy["tokens_per_second"] == Spread.of([50, 45])
    assert sharing["leaves_taken"] == Spread.of([1.0, 1.0])  # 2000 rows/s in 500 levels of 4
    assert sharing["sharing_holds"]


@pytest.mark.parametrize(("rows", "holds"), [(269, False), (271, True), (329, True), (331, False)])
def test_shares_are_near_the_weights(rows: int, holds: bool) -> None:
    readings = [Reading(0, [0, 0], [0, 0], 2.0), Reading(1, [rows, 100], [0, 0], 2.0)]
    assert sharing_of(readings, [3, 1], 4)["sharing_holds"] == holds


def test_keys_let_each_tenant_in_with_its_weight(tmp_path: Path) -> None:
    options, tenants = write_keys(tmp_path, [3, 1])
    key, allow = (Path(option.partition("=")[2]) for option in options)
    keys = load_pool_keys(key, allow)
    assert keys is not None
    for weight, tenant in zip((3, 1), tenants, strict=True):
        [target] = load_target_keys(tenant["draft_key"], tenant["draft_pool_key"], 1)
        assert target is not None and target.pool == keys.own.public
        assert keys.allowed[target.own.public].weight == weight


def test_one_weight_is_not_shared(measure: Measure) -> None:
    with pytest.raises(ParameterError, match="weights"):
        measure(run_sharing, "sharing", weights="1")


def window(seconds: float, *counts: int) -> Window:
    return Window(seconds, np.array(counts))


def test_a_kill_is_judged_by_the_streams_of_the_other_pool() -> None:
    groups = groups_of(["a", "b", "a", "b"], "b")
    assert groups == {"others": [0, 2], "moved": [1, 3]}
    windows = [window(2.0, 100, 50, 60, 50), window(1.0, 40, 5, 32, 5), window(2.0, 80, 80, 80, 70)]
    kill = Kill(windows, groups)
    assert [kill.rate("others", phase) for phase in KILL_PHASES] == [80, 72, 80]
    failover = failover_of([kill])
    assert failover["failover_holds"] and failover["seconds_to_move"].median == 1.0
    assert (failover["kept_moving"].median, failover["kept_after"].median) == (0.9, 1.0)
    moving = failover["groups"][4]
    assert (moving["group"], moving["phase"], moving["tokens_per_second"].median) == ("moved", "moving", 10)
    slower = Kill([windows[0], window(1.0, 40, 5, 31, 5), windows[2]], groups)
    assert not failover_of([slower])["failover_holds"]
    for spread in (["a", "a"], ["b", "b"]):
        with pytest.raises(EngineError, match="spread"):
            groups_of(spread, "b")


# -- stall


@pytest.mark.usefixtures("_one_pool")
def test_stall(measure: Measure) -> None:
    results = measure(run_stall, "stall", seconds=0.3, pause=0.3, repeats=1, max_tokens=48, **PACED).results
    assert [phase["phase"] for phase in results["phases"]] == ["before", "during", "after"]
    for phase in results["phases"]:
        assert phase["steps"] > 0 and 4 <= phase["p50_ms"] <= phase["p99_ms"] <= phase["max_ms"]
    assert results["phases"][0]["tokens_per_step"] > 1


def record(before: float, ended: float, **counts: int) -> StepRecord:
    given = {"sequences": 1, "rows": 5, "nodes": 4, "committed": 2, **counts}
    zeros = dict.fromkeys(("depth", "offered", "accepted", "hits"), 0)
    return StepRecord(before, *[before] * 7, ended, **given, **zeros)


def test_periods_are_from_end_to_end_without_prompts() -> None:
    steps = [record(i, i + 0.010) for i in range(9)] + [record(9, 9.020, committed=4), record(10, 19, rows=200)]
    phase = phase_of("before", steps)
    assert (phase["steps"], phase["prompt_steps"]) == (10, 1)
    assert phase["p50_ms"] == pytest.approx(10) and phase["max_ms"] == pytest.approx(20)
    assert 18 < phase["p99_ms"] < 20 and phase["tokens_per_step"] == pytest.approx(2.2)


# -- what they share


def test_streams_go_on_without_end(llama: Path, prompts: list[Prompt]) -> None:
    with make_engine(llama) as engine:
        streams = EndlessStreams(engine, Workload(prompts, 0.8, 3), 2)
        first = [request.id for request in streams.requests]
        streams.step()
        streams.step()
        assert [request.id for request in streams.requests] == first and streams.tokens.tolist() == [2, 2]
        streams.step()  # their last
        assert streams.tokens.tolist() == [3, 3] and not set(first) & {request.id for request in streams.requests}
        left = iter([False, False, True])
        passed = streams.run(lambda: next(left))
        assert passed.counts.tolist() == [3, 3] and passed.seconds > 0


def test_rates_are_of_some_streams() -> None:
    assert window(2.0, 4, 6, 10).rate([0, 2]) == 7


def test_a_pool_that_does_not_start_is_told(config: EngineConfig, tmp_path: Path) -> None:
    with (
        start_pool(replace(config, draft=tmp_path / "none")) as pool,
        pytest.raises(EngineError, match="draft pool: exited with code 2"),
    ):
        assert pool.told
    pool.close()  # again: nothing


@pytest.mark.parametrize("options", [["--round-trips", "5,1"], ["--pace", "target=1"], ["--budget", "some"]])
def test_bad_usage(llama: Path, draft: Path, prompt_file: Path, options: list[str]) -> None:
    models = ["--target", str(llama), "--draft", str(draft), "--prompts", str(prompt_file)]
    assert isinstance(CliRunner().invoke(app, ["network", *models, *options]).exception, InputError)
