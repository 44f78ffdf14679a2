"""Simulated fleets, and what limits them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pilotfish.bench import app
from pilotfish.bench.fleet_limits import ServerLoad, limits_of, on_paper
from pilotfish.bench.server_costs import follow_costs
from pilotfish.core.routing.router import RoundRobin
from pilotfish.errors import ParameterError
from pilotfish.plan.fleets.fleet import simulate
from pilotfish.plan.fleets.fleet_plan import FleetPlan, paced_target
from pilotfish.plan.fleets.traffic import ConversationTraffic


def report_of(*options: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["fleet", "--seconds=60", "--json", *options])
    assert result.exit_code == 0, result.exception
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def test_policies_stand_side_by_side_for_each_fleet() -> None:
    report = report_of("--targets=1,3", "--rate=1", "--per-server=2", "--routings=round-robin,prefix")
    rows = report["fleets"]
    assert [(row["targets"], row["routing"]) for row in rows] == [
        (1, "round-robin"), (1, "prefix"), (3, "round-robin"), (3, "prefix"),
    ]  # fmt: skip
    assert all(row["requests"] > 10 and row["refused"] == 0 and row["first_token_ms_p50"] > 0 for row in rows)
    assert rows[0]["hit_rate"] == rows[1]["hit_rate"]  # there is nothing to choose
    loads = report["one_server"]
    assert [(row["targets"], row["servers"], row["simulated"]) for row in loads] == [
        (1, 1, True), (3, 2, True), (3000, 2000, False), (10000, 6667, False),
    ]  # fmt: skip
    assert all(row["all"] > 0 for row in loads)
    assert {row["part"] for row in report["limits"]} >= {"requests", "events", "decisions", "held", "reports"}


def test_prompts_are_computed_elsewhere_where_that_was_asked_for() -> None:
    own, elsewhere = (
        report_of("--targets=2", "--rate=1", "--routings=prefix", *more)["fleets"][0]
        for more in ((), ("--per-prefill=2",))
    )
    assert own["prefills"] == 0 < elsewhere["prefills"] < 1
    assert elsewhere["gap_ms_p95"] < own["gap_ms_p95"]


def test_a_trace_is_played_as_often_as_the_rate_asks_for(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 1000 * i,
            "input_length": 2000,
            "output_length": 20,
            "hash_ids": [0, *range(3 * i + 1, 3 * i + 4)],
        }
        for i in range(30)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)) + "\n")
    (row,) = report_of(f"--trace={trace}", "--targets=2", "--rate=2", "--routings=prefix")["fleets"]
    assert row["requests"] == pytest.approx(2 * 2 * 40, rel=0.1)
    assert row["hit_rate"] == pytest.approx(512 / 2000, abs=0.02)


@pytest.mark.parametrize(
    ("option", "field"),
    [
        ("--targets=0", "targets"),
        ("--routings=random", "routings"),
        ("--target-device=llama-3.1-70b@h200", "pace"),
        ("--rate=0", "rate"),
    ],
)
def test_what_is_not_allowed_is_named(option: str, field: str) -> None:
    result = CliRunner().invoke(app, ["fleet", option])
    assert isinstance(result.exception, ParameterError) and result.exception.field == field


def test_what_a_server_hears_of_all_targets_grows_with_them() -> None:
    load = ServerLoad(requests=0.2, events=0.1, frames=0.1, decisions=0.01, held=0.02, reports=0.03, beats=0.01)
    more = on_paper(load, 10.0)
    assert more == ServerLoad(requests=0.2, events=0.1, frames=0.1, decisions=0.1, held=0.2, reports=0.3, beats=0.1)
    assert (load.largest, more.largest, more.all) == ("requests", "reports", pytest.approx(1.1))


def test_limits_are_where_a_part_takes_a_whole_core() -> None:
    load = ServerLoad(requests=0.2, events=0.1, frames=0.05, decisions=0.01, held=0.02, reports=0.04, beats=0.01)
    plan = FleetPlan(targets=10, servers=2, target=paced_target([0.01] * 65, 0.0, 4000, 8))
    figures = simulate(plan, ConversationTraffic(rate=1.0, seconds=20.0), RoundRobin)
    rows = {row["part"]: (row["of_one_server"], row["of_a_fleet"]) for row in limits_of(plan, figures, load)}
    assert rows["requests"] == (pytest.approx(25), None)
    assert rows["reports"] == (pytest.approx(250), pytest.approx(250))
    # one server alone makes twice the decisions; at 7.07 times the targets 7.07 times as many that cost as much more
    assert rows["decisions"] == (pytest.approx(10 / (2 * 0.01) ** 0.5), pytest.approx(1000))


def test_costs_of_following_are_measured() -> None:
    few, many = follow_costs(2), follow_costs(40)
    assert all(cost > 0 for cost in (few.decision, few.key, few.report))
    assert many.decision > few.decision
    assert 8 < many.key_bytes < 16
