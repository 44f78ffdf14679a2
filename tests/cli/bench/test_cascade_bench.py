"""The bench that finds a cascade's threshold: on outcomes that are made up, and once on two models."""

import tomllib
from pathlib import Path

import pytest
from command_runs import Measure
from hypothesis import given
from hypothesis import strategies as st
from support import write_tokenizer

from pilotfish.cli.bench.options import BENCHES
from pilotfish.cli.bench.report import ProgressBar
from pilotfish.cli.bench.tasks import cascade
from pilotfish.cli.bench.tasks.cascade import CascadedTask, outcomes, report_of, run_cascade
from pilotfish.errors import ModelError, ParameterError

tasks_of = st.lists(
    st.builds(CascadedTask, st.sampled_from(("exact", "json")), st.floats(-9, 0), st.booleans(), st.booleans()),
    min_size=1,
    max_size=30,
)


def task(confidence: float, small: bool, large: bool = True, category: str = "exact") -> CascadedTask:
    return CascadedTask(category, confidence, small, large)


#: The small model fails where it is unsure, and the large one once.
SURE = [task(-0.1, True), task(-0.2, True), task(-0.4, True, False), task(-0.6, False), task(-0.9, False)]


def test_a_threshold_says_who_answers() -> None:
    found = cascade.outcome(SURE, -0.4)
    assert (found.answered_by_small, found.success, found.small_success, found.large_success) == (0.6, 1.0, 0.6, 0.8)


@given(tasks_of, st.floats(0, 0.5))
def test_the_choice_loses_no_more_than_it_may(tasks: list[CascadedTask], loss: float) -> None:
    found = outcomes(tasks)
    best = cascade.chosen(found, loss)
    assert best.success >= best.large_success - loss - 1e-6
    assert all(one.success < one.large_success - loss for one in found if one.threshold < best.threshold)
    assert found[0].answered_by_small == 1 and found[0].success == found[0].small_success
    assert found[-1].answered_by_small == 0 and found[-1].success == found[-1].large_success
    shares = [one.answered_by_small for one in found]
    assert shares == sorted(shares, reverse=True)


@given(tasks_of)
def test_halves_have_of_each_category_as_many(tasks: list[CascadedTask]) -> None:
    parts = cascade.halves(tasks)
    assert sorted(map(repr, (*parts[0], *parts[1]))) == sorted(map(repr, tasks))
    for name in ("exact", "json"):
        counts = [sum(one.category == name for one in part) for part in parts]
        assert counts[0] - counts[1] in (0, 1)


def test_confidence_is_the_servers() -> None:
    assert cascade.confidence_of([-1.0, -2.0, -9.0], 2) == -1.5 and cascade.confidence_of([-1.0], 2) == -1.0


def test_the_other_half_says_what_it_is_worth(tmp_path: Path) -> None:
    other = [task(-0.1, True), task(-0.2, False), task(-0.4, True), task(-0.6, True), task(-0.9, False)]
    mixed = [one for pair in zip(SURE, other, strict=True) for one in pair]
    save = tmp_path / "threshold.toml"
    options = BENCHES["cascade"].options(loss=0.0, tokens=8, save=save)
    results = report_of(mixed, options).results
    assert results["chosen"]["threshold"] == -0.6 and results["chosen"]["success"] == 0.8
    honest = results["on_the_other_half"]
    assert (honest["threshold"], honest["answered_by_small"], honest["success"], honest["tasks"]) == (-0.6, 0.8, 0.8, 5)
    assert honest["large_success"] == 1.0 and honest["small_success"] == 0.6
    assert tomllib.loads(save.read_text()) == {"threshold": -0.6, "tokens": 8}
    with pytest.raises(ParameterError, match=r"^save: .* a file that can be written"):
        report_of(mixed, BENCHES["cascade"].options(save=tmp_path / "no" / "file"))
    with pytest.raises(ParameterError, match=r"^each: .* two tasks of a category at least"):
        report_of(SURE[:1], BENCHES["cascade"].options(each=1))


def test_two_models(measure: Measure, draft: Path) -> None:
    given = {"small": draft, "each": 4, "max_tokens": 24, "kv_slots": 4096, "threads": 1, "tokens": 4}
    results = measure(run_cascade, "cascade", **given).results
    assert len(results["outputs"]) == 12 and results["on_the_other_half"]["tasks"] == 6
    assert [row["category"] for row in results["categories"]] == ["exact", "json", "tools"]
    assert all(one["threshold"] < 0 for one in results["thresholds"][:-1])


def test_what_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"^small: None is not allowed; expected --target and --small together"):
        run_cascade(BENCHES["cascade"].options(target=llama), ProgressBar())
    write_tokenizer(other := tmp_path / "other", 300)
    with pytest.raises(ModelError, match=r"^small: .* reads prompts otherwise: token "):
        run_cascade(BENCHES["cascade"].options(target=llama, small=other), ProgressBar())
