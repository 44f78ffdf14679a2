"""What the report says of differences that are there, of none, and of too few requests; how alpha is shared."""

from typing import Any

import msgspec
import numpy as np
import pytest
from watched_rollouts import latencies

from pilotfish.errors import ParameterError
from pilotfish.operate import report as reporting
from pilotfish.operate.arms import MEASURES, RolloutArms
from pilotfish.operate.intervals import Interval
from pilotfish.operate.outcome import Cohort, RequestOutcome


def outcome(variant: str, number: int, **fields: Any) -> RequestOutcome:
    known: dict[str, Any] = {"ended": 3600.0 + number, "ttft": 0.2, "latency": 2.0, "tokens": 100, "steps": 50}
    return RequestOutcome(variant=variant, cohort=Cohort(), **(known | fields))


def traffic(shares: dict[str, float], ratios: dict[str, float], requests: int, **fields: Any) -> RolloutArms:
    """Requests of variants by share, whose ITL is the holdout's times a ratio."""
    random = np.random.default_rng(7)
    made = RolloutArms(holdout="off", since=3600.0, **fields)
    names = random.choice(list(shares), requests, p=list(shares.values()))
    for number, (name, itl) in enumerate(zip(names, np.exp(latencies(random, (requests,))), strict=True)):
        made.add(outcome(str(name), number, itl=float(itl) * ratios.get(str(name), 1.0)))
    return made


def rows(report: reporting.RolloutReport, measure: str = "itl") -> dict[str, reporting.RolloutRow]:
    return {row.variant: row for row in report.rows if row.measure == measure}


@pytest.fixture(scope="module")
def report() -> reporting.RolloutReport:
    ratios = {"fast": 0.8, "slow": 1.5}
    return reporting.rollout_report(traffic({"off": 0.4, "fast": 0.2, "slow": 0.2, "same": 0.2}, ratios, 6000), 0.05)


def test_differences_are_found_and_said(report: reporting.RolloutReport) -> None:
    found = rows(report)
    assert found["fast"].finding.startswith("faster by ") and found["fast"].better is True
    assert found["slow"].finding.startswith("slower by ") and found["slow"].better is False
    assert found["same"].finding == reporting.NO_DIFFERENCE and found["same"].better is None
    for name, ratio in (("fast", 0.8), ("slow", 1.5), ("same", 1.0)):
        difference = found[name].difference
        assert difference is not None and difference.holds(ratio - 1)


def test_the_holdout_has_a_mean_and_no_difference(report: reporting.RolloutReport) -> None:
    row = rows(report)["off"]
    assert (row.difference, row.better, row.finding) == (None, None, "")
    assert row.value is not None and row.value.low < np.exp(np.log(0.02) + 0.02 * 2.3) < row.value.high


def test_there_is_a_row_of_each_measure_and_variant_and_one_measure_is_primary(report: reporting.RolloutReport) -> None:
    assert [(row.measure, row.variant) for row in report.rows] == [
        (measure, name) for measure in MEASURES for name in [one.variant for one in report.variants]
    ]
    assert {row.measure for row in report.rows if row.primary} == {"itl"}
    assert set(reporting.WORDS) == set(MEASURES)


def test_few_requests_say_nothing() -> None:
    report = reporting.rollout_report(traffic({"off": 0.5, "new": 0.5}, {"new": 0.5}, 150), 0.05)
    row = rows(report)["new"]
    assert row.finding == reporting.NOT_ENOUGH and row.difference is None and row.better is None and row.value is None


def test_variants_share_alpha() -> None:
    """With three, each has a third of it, and a wider interval than alone."""
    arms = traffic({"off": 0.5, "new": 0.5}, {}, 1000)
    alone = reporting.rollout_report(arms, 0.06)
    for name in ("other", "third"):
        arms.add(outcome(name, 0, itl=0.02))
    together, stricter = reporting.rollout_report(arms, 0.06), reporting.rollout_report(arms, 0.02)
    assert (alone.interval_alpha, together.interval_alpha) == (0.06, pytest.approx(0.02))
    narrow, wide, third = (rows(report)["new"].difference for report in (alone, together, stricter))
    assert narrow is not None and wide is not None and wide.high - wide.low > narrow.high - narrow.low
    assert third is not None and third.high - third.low > wide.high - wide.low


def test_shares_are_told_in_points_and_scores_in_their_own_measure() -> None:
    arms = RolloutArms(holdout="off", since=0.0)
    for number in range(4000):
        new = number % 2 == 0
        fields = {"failed": new and number % 10 == 0, "valid": True, "score": 0.8 if new else 0.5}
        arms.add(outcome("new" if new else "off", number, itl=0.02, **fields))
    report = reporting.rollout_report(arms, 0.05)
    failed, valid, score = (rows(report, name)["new"] for name in ("failed", "valid", "score"))
    assert failed.finding.startswith("higher by 20 points (") and failed.better is False
    assert failed.value is not None and failed.value.holds(0.2)
    assert valid.finding == reporting.NO_DIFFERENCE and valid.value is not None and valid.value.high == 1
    assert score.finding == "higher by 30 points (30 to 30)" and score.better is True


@pytest.mark.parametrize(
    ("measure", "interval", "words"),
    [
        ("itl", Interval(-0.12, -0.19, -0.05), "faster by 12 % (5 % to 19 %)"),
        ("itl", Interval(0.5, 0.011, 1.2), "slower by 50 % (1.1 % to 120 %)"),
        ("itl", Interval(-0.12, -0.19, 0.0), reporting.NO_DIFFERENCE),
        ("ttft", None, reporting.NOT_ENOUGH),
        ("tokens_per_second", Interval(0.25, 0.1, 0.4), "faster by 25 % (10 % to 40 %)"),
        ("tokens_per_second", Interval(-0.25, -0.4, -0.1), "slower by 25 % (10 % to 40 %)"),
        ("failed", Interval(0.012, 0.0034, 0.0206), "higher by 1.2 points (0.34 to 2.1)"),
        ("tokens_per_step", Interval(0.8, 0.7, 0.9), "higher by 0.8 (0.7 to 0.9)"),
    ],
)
def test_findings_in_words(measure: str, interval: Interval | None, words: str) -> None:
    assert reporting.finding(measure, interval) == words


def test_what_a_difference_takes_follows_from_what_was_seen(report: reporting.RolloutReport) -> None:
    needs = {(need.variant, need.difference): need.requests for need in report.needs}
    assert {name for name, _ in needs} == {"fast", "slow", "same"}
    for name in ("fast", "slow", "same"):
        assert needs[name, 0.01] > 10 * needs[name, 0.05] > 20 * needs[name, 0.1] > 0
    assert any("of 1 %: about " in line and "5 %: about " in line for line in reporting.notes(report))


def test_without_a_holdout_nothing_is_compared() -> None:
    arms = traffic({"a": 0.5, "b": 0.5}, {}, 400)
    arms.holdout = ""
    report = reporting.rollout_report(arms, 0.05)
    assert {row.finding for row in report.rows} == {reporting.NO_HOLDOUT}
    assert "no holdout" in reporting.summary(report)[0]


def test_the_summary_counts_what_is_not_compared() -> None:
    arms = traffic({"off": 0.5, "new": 0.5}, {}, 200, left_out=4, sticky="client")
    arms.add(outcome("new", 1, cut=True))
    arms.add(outcome("new", 1, pinned=True))
    report = reporting.rollout_report(arms, 0.05)
    assert any(line.startswith("new: ") and line.endswith("; 1 cut, not compared; 1 pinned, not compared")
               for line in reporting.summary(report))  # fmt: skip
    assert "1970-01-01 01:00:00+00:00" in reporting.summary(report)[0] and reporting.summary(report)[-1].startswith(
        "4 requests"
    )
    assert any("stick to clients" in line for line in reporting.notes(report))


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1, 7.0, float("nan")])
def test_alpha_is_a_chance(alpha: float) -> None:
    with pytest.raises(ParameterError, match=r"alpha: .* is not allowed; expected a number between 0 and 1"):
        reporting.rollout_report(RolloutArms(holdout="off", since=0.0), alpha)


def test_a_mean_that_no_time_has_is_cut() -> None:
    """A file may say anything."""
    body = {"count": 200, "mean": 1e6, "squares": 1e300}
    arms = msgspec.convert(
        {"holdout": "off", "since": 0, "arms": {"off": {"requests": 200, "moments": {"itl": body}}}}, RolloutArms
    )
    value = rows(reporting.rollout_report(arms, 0.05))["off"].value
    assert value is not None and np.isfinite(value.high)
