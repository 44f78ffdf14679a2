"""`bench run` and `bench tune` on a tiny pair; grids of settings, halving and the crossover by themselves."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from command_runs import Measure
from hypothesis import given
from hypothesis import strategies as st
from inline_drafts import inline_drafts

from pilotfish.cli.bench.modes.run import run_modes
from pilotfish.cli.bench.modes.settings import grid_of
from pilotfish.cli.bench.modes.tune import halve, run_tune, rungs
from pilotfish.cli.bench.options import BENCHES
from pilotfish.cli.bench.workload import Prompt, first_of_each
from pilotfish.cli.pages.result_plots import crossover, crossover_text
from pilotfish.cli.pages.saved_result import saved_result
from pilotfish.errors import InputError


def test_all_modes_take_part_and_off_is_never_left_out(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    short = {"concurrencies": "1,2", "each": 2, "max_tokens": 12, "repeats": 1, "kv_slots": 4096, "level_counts": "1,2"}
    with inline_drafts(monkeypatch):
        report = measure(run_modes, "run", modes="async,sync", budgets="fixed", **short)
    names = ["off", "async", "sync 1 levels", "sync 2 levels"]
    assert [row["setting"] for row in report.results["grid"]] == names
    assert not report.failed
    result = saved_result(report.as_json(), "test")
    assert [(one.setting, one.concurrency) for one in result.settings] == [(name, c) for c in (1, 2) for name in names]
    assert all(one.equal_outputs == 1 for one in result.settings)
    assert len(result.requests) == len(names) * 2 * 2  # settings, concurrencies, prompts
    assert all(len(one.times) == 12 and one.first == one.times[0] for one in result.requests)
    deepest = {one.setting: len(one.by_depth.offered) for one in result.acceptance if one.by_depth and one.load == 1}
    assert deepest["off"] == 0 and deepest["sync 1 levels"] == 1 and deepest["sync 2 levels"] == 2


def test_a_winner_is_measured_again_and_written(measure: Measure, tmp_path: Path) -> None:
    chosen = tmp_path / "chosen.toml"
    small = {"node_counts": "2", "level_counts": "2", "widths": "1", "drafters": "lm", "candidates": 1, "each": 1}
    report = measure(run_tune, "tune", modes="off,sync", repeats=1, max_tokens=8, kv_slots=4096, save=chosen, **small)
    results = report.results
    assert {row["setting"] for row in results["tried"]} == {"off", "default", "sync"}
    assert {"off", "default"} <= {row["setting"] for row in results["settings"]}
    assert results["chosen"] in {"off", "default", "sync"}
    written = tomllib.loads(chosen.read_text())
    assert written["mode"] == ("off" if results["chosen"] == "off" else "sync")
    assert ("draft" in written) == (results["chosen"] != "off")
    saved_result(report.as_json(), "test")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"modes": "sync,fast"}, "modes: 'sync,fast'"),
        ({"node_counts": "0"}, "nodes: '0'"),
        ({"drafters": "lm,guess"}, "drafter: 'guess'"),
        ({"budgets": "none"}, "budget: 'none'"),
        ({"splits": "0"}, "cores: '0'"),
        ({"node_counts": "4096"}, "nodes: 4096"),
    ],
)
def test_what_is_no_setting_is_refused_before_anything_is_loaded(given: dict[str, str], named: str) -> None:
    with pytest.raises(InputError, match=named):
        grid_of(BENCHES["run"].options(prompts=Path("none"), **given))


def test_names_say_what_differs() -> None:
    options = BENCHES["run"].options(prompts=Path("none"), node_counts="4,8", leaf_counts="8", level_counts="2,3")
    names = ["off", *(f"sync {d} levels, {n} nodes" for d in (2, 3) for n in (4, 8)), "async 4 nodes", "async 8 nodes"]
    assert [one.name for one in grid_of(options)] == names


def test_a_limit_is_of_each_category() -> None:
    prompts = [Prompt(str(i), "text", kind) for i, kind in enumerate("aaabbc")]
    assert [one.id for one in first_of_each(prompts, 2)] == ["0", "3", "5", "1", "4"]
    assert first_of_each(prompts, None) == prompts


# -- halving


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40))
def test_where_scores_are_true_the_best_wins(scores: list[int]) -> None:
    played: list[tuple[int, int]] = []

    def play(left: Sequence[int], rounds: int) -> Mapping[int, float]:
        played.append((len(left), rounds))
        return {one: scores[one] for one in left}

    assert scores[halve(range(len(scores)), 2, play)] == max(scores)
    assert played == rungs(len(scores), 2)
    assert all(b[1] == 2 * a[1] and b[0] == (a[0] + 1) // 2 for a, b in pairwise(played))


# -- the crossover


def test_the_crossover_is_interpolated_between_measured_loads() -> None:
    assert crossover([(1, 2.0), (4, 1.5), (16, 0.5)]) == pytest.approx(8)  # halfway on the logarithm
    assert crossover([(1, 2.0), (4, 1.0), (16, 0.5)]) == pytest.approx(4)
    assert crossover([(1, 2.0), (8, 1.1)]) is None
    assert crossover_text([(1, 2.0), (8, 1.1)]) == "pays from 1 to 8; the crossover is not within the range"
    assert crossover_text([(4, 0.9)]) == "does not pay at 4; the crossover is not within the range"
    assert crossover_text([(1, 0.9), (8, 1.1)]) == "pays at 8, but not at 1; it does not stop paying within the range"
    assert crossover_text([(1, 2.0), (4, 1.5), (16, 0.5)]) == "stops paying at about 8"


def test_what_is_no_result_is_refused_in_one_line() -> None:
    for text in ("{", b'{"seed": "\xff"}', "[]", "{}", '{"settings": [{"setting": 1}]}', '{"requests": []}'):
        with pytest.raises(InputError, match=r"result: 'file\.json'") as raised:
            saved_result(text, "file.json")
        assert "\n" not in str(raised.value)
