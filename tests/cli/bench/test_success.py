"""The bench of task success: modes succeed alike, and where their outputs differ the report fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
from command_runs import Measure
from test_parity import _accepts_first_child

from pilotfish.cli.bench.options import BENCHES
from pilotfish.cli.bench.tasks.success import chosen_tasks, run_eval
from pilotfish.cli.bench.workload import parse_choices
from pilotfish.config.fields import Mode
from pilotfish.core.scheduling import scheduler
from pilotfish.errors import ParameterError

pytestmark = pytest.mark.usefixtures("drafts")
MODES = ("off", "sync", "async")
SHORT = {"each": 2, "max_tokens": 32, "kv_slots": 4096, "threads": 1}


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """The first is solved as it is, the second is not."""
    path, test = tmp_path / "problems.jsonl", "def check(f):\n    assert f() == 0"
    rows = [{"task_id": f"own/{i}", "prompt": f"def f():\n    return {i}\n", "test": test} for i in range(2)]
    path.write_text("\n".join(json.dumps({**row, "entry_point": "f"}) for row in rows))
    return path


def test_modes_succeed_alike(measure: Measure, problems: Path) -> None:
    given = {
        **SHORT,
        "max_tokens": 96,
        "allow_code_execution": True,
        "humaneval": str(problems),
        "modes": ",".join(MODES),
    }
    report = measure(run_eval, "eval", **given)
    rows = report.results["categories"]
    assert [row["category"] for row in rows] == ["exact", "json", "tools", "code", "humaneval"]
    assert [row["tasks"] for row in rows] == [2, 2, 2, 2, 2] and not report.failed
    assert report.results["unequal"] == sum(row["unequal"] for row in rows) == 0
    assert rows[1]["off_successes"] and rows[2]["off_successes"]
    for row in rows:
        assert len({row[f"{mode}_successes"] for mode in MODES}) == 1
        assert row["off_tokens_per_verify_step"] == 1 <= row["sync_tokens_per_verify_step"]
    assert any(row["sync_tokens_per_verify_step"] > 1 for row in rows)
    outcomes = report.results["outcomes"]
    for outcome in outcomes:
        assert outcome["equal"] and len({outcome[mode] for mode in MODES}) == 1
        assert outcome["off"] == (outcome["reason"] == "")
        if outcome["category"] in ("json", "tools"):  # what the grammar let end is valid
            assert outcome["off"] or outcome["cut_off"]
    for row in rows:
        own = [outcome for outcome in outcomes if outcome["category"] == row["category"]]
        assert row["off_successes"] == sum(outcome["off"] for outcome in own)
        assert row["off_success_rate"] == row["off_successes"] / len(own)
    assert isinstance(report.results["programs_confined_to_their_directory"], bool)


def test_outputs_that_differ_are_found(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "walk", _accepts_first_child)
    report = measure(run_eval, "eval", **SHORT, modes="off,sync")
    assert (
        report.failed and report.results["unequal"] == sum(row["unequal"] for row in report.results["categories"]) > 0
    )
    assert report.results["unequal"] == sum(not outcome["equal"] for outcome in report.results["outcomes"])
    low = measure(run_eval, "eval", **{**SHORT, "each": 1}, modes="off,sync", dtype="bfloat16")
    assert low.results["unequal"] and not low.failed  # equality is promised in float32


def test_code_is_left_out_unless_it_may_run(measure: Measure) -> None:
    report = measure(run_eval, "eval", **{**SHORT, "each": 1}, modes="off")
    assert [row["category"] for row in report.results["categories"]] == ["exact", "json", "tools"]
    assert report.results["left_out"] == "code: --allow-code-execution runs it"
    assert "programs_confined_to_their_directory" not in report.results


def test_what_is_refused(problems: Path) -> None:
    for modes in ("", "off,off", "fast", "off, sync"):
        with pytest.raises(ParameterError, match=r"^modes: .* expected some of off, sync, async, separated by commas$"):
            parse_choices("modes", modes, get_args(Mode))
    with pytest.raises(ParameterError, match=r"^humaneval: .* expected --allow-code-execution with it"):
        chosen_tasks(BENCHES["eval"].options(humaneval=str(problems)))
