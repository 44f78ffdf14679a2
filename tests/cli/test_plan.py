"""`pilotfish plan`: for people and programs; what is refused."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from command_runs import Refused, Run, write_rows

from pilotfish.cli.bench import contestants
from pilotfish.cli.bench.modes.engines import Level
from pilotfish.cli.plan.calibrate import SYNC, Measured, host_costs
from pilotfish.config.engine import EngineConfig
from pilotfish.engine.pairs import resolve_pair
from pilotfish.plan.published import PUBLISHED
from pilotfish.workers.records import StepRecord


def test_every_published_row_is_printed_beside_its_error(pilotfish: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    lines = pilotfish("plan", "published").stdout.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(PUBLISHED)]] == list(PUBLISHED)
    (record,) = pilotfish("plan", "published", "--json").rows
    assert list(record["rows"]) == list(PUBLISHED)
    row = record["rows"]["trtllm-70b"]
    assert (row["kind"], row["published"]) == ("calibrates", 51.14)
    assert row["error"] == row["predicted"] / row["published"] - 1


# -- hardware and whatif

PLAN = Path(__file__).parents[2] / "docs" / "plans" / "one-h200-llama-70b.toml"
SMALL = ("--target", "llama-3.1-8b", "--devices", "h100x2@2-3,l40s@1", "--drafts", "llama-3.2-1b=0.7")
LOAD = ("--prompt", 1000, "--output", 200, "--users", 4)
WORDS = (
    *("Buy 1 x H200 SXM", "Uncertainty: on 18 published rows", "USD per million", "A target's time goes to"),
    *("is stopped by", "takes room from each target", "Speculation", "break even", "Not validated"),
)


def test_a_plan_is_told_to_people(pilotfish: Run) -> None:
    result = pilotfish("plan", "hardware", PLAN)
    assert (result.code, result.stderr) == (0, "") and all(words in result.stdout for words in WORDS)


def test_options_replace_what_a_plan_says(pilotfish: Run) -> None:
    (record,) = pilotfish("plan", "hardware", PLAN, "--rate", 0.5, "--tpot", 0.1, "--json").rows
    situation = record["situation"]
    assert (situation["workload"]["rate"], situation["workload"]["users"]) == (0.5, None)
    assert situation["limits"]["tpot"] == 0.1 and situation["limits"]["ttft"] == 2.0
    assert record["shortfall"] == 0 and record["headroom"] > 1


def test_a_plan_of_options_alone(pilotfish: Run) -> None:
    (record,) = pilotfish("plan", "hardware", *SMALL, *LOAD, "--json").rows
    assert record["situation"]["devices"][1] == {"name": "l40s", "count": 1, "price": [1.0, 1.0]}
    kinds = {one["kind"] for one in record["kinds"]}
    assert {"off", "sync, draft co-resident", "sync, draft apart", "async, draft apart", "off, prefill apart"} <= kinds
    assert record["chosen"]["usd_per_million"]["low"] > 0 and record["chosen"]["point"]["shares"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((*SMALL, "--prompt", 5, "--users", 1), "prompt: 5 is not allowed; expected both"),
        ((*SMALL[:2], "--devices", "h100@x", *LOAD), "devices: 'h100@x' is not allowed"),
        ((*SMALL[:4], "--drafts", "llama-3.2-1b=x", *LOAD), "drafts: 'llama-3.2-1b=x' is not allowed"),
        (("none.toml",), "plan: 'none.toml' is not allowed; expected a file that can be read (No such"),
        ((Path(__file__),), "is not TOML"),
        ((*SMALL, *LOAD, "--tpot", "0.00001"), "limits: 'tpot 1e-05' is not allowed"),
    ],
)
def test_bad_plans(refused: Refused, arguments: tuple[object, ...], why: str) -> None:
    assert why in refused("plan", "hardware", *arguments)


def test_a_trace_is_planned_for_its_mean_and_its_peak(pilotfish: Run, refused: Refused, tmp_path: Path) -> None:
    requests = [
        {"timestamp": 1000 * (i + i % 7), "input_length": 900, "output_length": 90, "hash_ids": [0, i]}
        for i in range(99)
    ]
    path = write_rows(tmp_path / "trace.jsonl", *requests)
    few = ("--target", "llama-3.1-8b", "--devices", "l40s@1")
    (record,) = pilotfish("plan", "whatif", path, *few, "--json").rows
    assert record["trace"]["requests"] == 99 and record["trace"]["peak"] >= record["trace"]["mean"] > 0.9
    assert record["mean"]["situation"]["workload"]["rate"] == record["trace"]["mean"]
    printed = pilotfish("plan", "whatif", path, *few).stdout
    assert printed.startswith("99 requests in 2 minutes") and "mean:" in printed and "peak:" in printed
    write_rows(path, requests[0])
    assert "a minute or more is needed" in refused("plan", "whatif", path, *SMALL)
    write_rows(path, {"timestamp": 0, "input_length": 9, "hash_ids": [1]})
    assert "trace.jsonl:1 is not allowed" in refused("plan", "whatif", path, *SMALL)


# -- simulate

RUN = ("plan", "simulate", "--target", "1:10ms/32:20ms", "--draft", "1ms", "--requests", "4", "--output-tokens", "16")


def test_a_table_has_each_mode_at_each_concurrency(pilotfish: Run) -> None:
    result = pilotfish(*RUN, "--concurrency", "2,4")
    assert (result.code, result.stderr) == (0, "")
    for setting in ("sync, fixed", "sync, auto", "async, fixed", "async, auto"):
        lines = [line for line in result.stdout.splitlines() if line.startswith(setting)]
        assert [len(line.split()) for line in lines[:2]] == 2 * [11 + setting.endswith("auto")] and "pay" in lines[2]


def test_json_has_points_and_crossovers(pilotfish: Run) -> None:
    options = ("--mode", "sync", "--fixed", "--rate", "1", "--acceptance", "0.7", "--json")
    (record,) = pilotfish(*RUN, *options).rows
    points = [(point["mode"], point["budget"], point["load"]) for point in record["points"]]
    assert points == [("off", "", 1.0), ("sync", "fixed", 1.0)]
    assert record["load"] == "rate" and record["crossovers"] == [{"mode": "sync", "budget": "fixed", "load": None}]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--target", "llama-3.1-80b@h200"), "target: 'llama-3.1-80b' is not allowed.*nearest: llama-3.1-8b"),
        (("--mode", "of"), "mode: 'of'"),
        (("--concurrency", "1,-2"), "concurrency: '1,-2'"),
        (("--rate", "nan"), "rate: 'nan'"),
        (("--trace", "pycod"), "trace: 'pycod'"),
        (("--nodes", "0"), "--nodes"),
    ],
)
def test_simulations_that_cannot_be(refused: Refused, options: tuple[str, ...], named: str) -> None:
    assert re.search(named, refused(*RUN, *options))


def test_guessing_needs_a_draft(pilotfish: Run, refused: Refused) -> None:
    assert "draft: None" in refused("plan", "simulate", "--target", "10ms")
    options = ("--target", "10ms", "--mode", "off", "--concurrency", "1", "--requests", "1", "--output-tokens", "4")
    (record,) = pilotfish("plan", "simulate", *options, "--json").rows
    assert [point["mode"] for point in record["points"]] == ["off"]


# -- calibrate: from records of steps and levels


STEP, SEQUENCE, NODE, LEVEL, WAITED = 0.0005, 0.00004, 0.00001, 0.0003, 0.0002
TARGET, DRAFT = 0.020, 0.004


def measured(name: str, sequences: int, nodes: int, began: float) -> Measured:
    drafting = SYNC[0] * (DRAFT + WAITED) if name == "sync" else 0.0
    period = TARGET + drafting + STEP + SEQUENCE * sequences + NODE * nodes
    steps = []
    for before, _ in pairwise(began + period * i for i in range(8)):
        moments = (before, before, before, before + drafting, before + drafting, *[before + period] * 4)
        counts = {"rows": sequences + nodes, "nodes": nodes, "depth": 3, "offered": nodes, "accepted": 1}
        steps.append(StepRecord(*moments, sequences=sequences, committed=2, hits=0, **counts))
    return Measured(name, contestants.Run(1.0, [], steps=steps), sequences)


def test_costs_are_those_that_the_records_have() -> None:
    models = resolve_pair("pycode")
    pace = "target=1:20ms/4096:20ms,draft=1:4ms/4096:4ms"
    config = EngineConfig(target=models.target, draft=models.draft, mode="async", drafter="lm", pace=pace)
    kinds = [(name, n, n * nodes) for n in (1, 4) for name, nodes in (("off", 0), ("sync", 12), ("async", 16))]
    runs = [measured(*kind, 10.0 * place) for place, kind in enumerate(kinds)]
    levels = [Level(at, at + DRAFT, 32, 0) for at in (20.0 + i * (DRAFT + LEVEL) for i in range(9))]
    found = host_costs(config, runs, levels)
    assert (found.step, found.sequence, found.node) == pytest.approx((STEP, SEQUENCE, NODE), rel=1e-3)
    assert found.level + 32 * found.leaf == pytest.approx(LEVEL)
    assert found.waited == pytest.approx(WAITED)
