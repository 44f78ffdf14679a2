"""`pilotfish plan hardware` and `whatif`: plans from files and options, for people and programs; what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

PLAN = Path(__file__).parents[2] / "docs" / "plans" / "one-h200-llama-70b.toml"
SMALL = ("--target", "llama-3.1-8b", "--devices", "h100x2@2-3,l40s@1", "--drafts", "llama-3.2-1b=0.7")
LOAD = ("--prompt", 1000, "--output", 200, "--users", 4)


def test_a_plan_is_told_to_people(pilotfish) -> None:
    result = pilotfish("plan", "hardware", PLAN)
    assert (result.code, result.stderr) == (0, "")
    for words in (
        "Buy 1 x H200 SXM",
        "Uncertainty: on 18 published rows",
        "USD per million",
        "A target's time goes to",
    ):
        assert words in result.stdout
    for words in ("is stopped by", "takes room from each target", "Speculation", "break even", "Not validated"):
        assert words in result.stdout


def test_options_replace_what_a_plan_says(pilotfish) -> None:
    (record,) = pilotfish("plan", "hardware", PLAN, "--rate", 0.5, "--tpot", 0.1, "--json").rows
    situation = record["situation"]
    assert (situation["workload"]["rate"], situation["workload"]["users"]) == (0.5, None)
    assert situation["limits"]["tpot"] == 0.1 and situation["limits"]["ttft"] == 2.0
    assert record["shortfall"] == 0 and record["headroom"] > 1


def test_a_plan_of_options_alone(pilotfish) -> None:
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
        (("none.toml",), "plan: none.toml cannot be read"),
        ((Path(__file__),), "is not TOML"),
        ((*SMALL, *LOAD, "--tpot", "0.00001"), "limits: 'tpot 1e-05' is not allowed"),
    ],
)
def test_bad_plans(pilotfish, arguments: tuple[object, ...], why: str) -> None:
    result = pilotfish("plan", "hardware", *arguments)
    assert result.code == 2 and why in result.stderr and result.stderr.count("\n") == 1 and not result.stdout


def test_a_trace_is_planned_for_its_mean_and_its_peak(pilotfish, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000 * (i + i % 7), "input_length": 900, "output_length": 90, "hash_ids": [0, i]}
        for i in range(99)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (record,) = pilotfish("plan", "whatif", path, *SMALL, "--json").rows
    assert record["trace"]["requests"] == 99 and record["trace"]["peak"] >= record["trace"]["mean"] > 0.9
    assert record["mean"]["situation"]["workload"]["rate"] == record["trace"]["mean"]
    printed = pilotfish("plan", "whatif", path, *SMALL).stdout
    assert printed.startswith("99 requests in 2 minutes") and "mean:" in printed and "peak:" in printed


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"timestamp": 0, "input_length": 9, "hash_ids": [1]}\n', "trace.jsonl:1 is not allowed"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 9, "hash_ids": [1]}\n', "a minute or more is needed"),
    ],
)
def test_bad_traces(pilotfish, tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    result = pilotfish("plan", "whatif", path, *SMALL)
    assert result.code == 2 and why in result.stderr and result.stderr.count("\n") == 1
