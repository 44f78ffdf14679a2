"""`pilotfish plan simulate`: a table or JSON of modes by load, and refusals in one line."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

SMALL = ("plan", "simulate", "--target", "1:10ms/32:20ms", "--draft", "1ms", "--requests", "4", "--output-tokens", "16")


def test_a_table_has_each_mode_at_each_concurrency(pilotfish) -> None:
    result = pilotfish(*SMALL, "--concurrency", "2,4")
    assert (result.code, result.stderr) == (0, "")
    for setting in ("sync, fixed", "sync, auto", "async, fixed", "async, auto"):
        lines = [line for line in result.stdout.splitlines() if line.startswith(setting)]
        assert [len(line.split()) for line in lines[:2]] == 2 * [11 + setting.endswith("auto")] and "pay" in lines[2]


def test_json_has_points_and_crossovers(pilotfish) -> None:
    options = ("--mode", "sync", "--fixed", "--rate", "1", "--acceptance", "0.7", "--json")
    (record,) = pilotfish(*SMALL, *options).rows
    assert [(point["mode"], point["budget"], point["load"]) for point in record["points"]] == [
        ("off", "", 1.0),
        ("sync", "fixed", 1.0),
    ]
    assert record["load"] == "rate" and record["crossovers"] == [{"mode": "sync", "budget": "fixed", "load": None}]


def test_off_needs_no_draft(pilotfish) -> None:
    options = ("--target", "10ms", "--mode", "off", "--concurrency", "1", "--requests", "1", "--output-tokens", "4")
    (record,) = pilotfish("plan", "simulate", *options, "--json").rows
    assert [point["mode"] for point in record["points"]] == ["off"]


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
def test_bad_input_is_one_line(pilotfish, options: tuple[str, ...], named: str) -> None:
    result = pilotfish(*SMALL, *options)
    assert result.code == 2 and result.stderr.count("\n") == 1
    assert re.search(named, result.stderr)


def test_guessing_needs_a_draft(pilotfish) -> None:
    assert "draft: None" in pilotfish("plan", "simulate", "--target", "10ms").stderr


def test_it_runs_without_torch() -> None:
    command = [*SMALL, "--concurrency", "1", "--requests", "1", "--json"]
    code = f"import sys; from pilotfish.cli import main; main({command!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
