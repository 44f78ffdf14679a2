"""The official client gives one answer to a request, whatever the mode, the load, and the way it is sent."""

from __future__ import annotations

import pytest
from openai_cases import CASES, Case
from openai_fleet import Answer, Fleet

each_case = pytest.mark.parametrize("case", CASES, ids=str)


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 50 and len({str(case) for case in CASES}) == len(CASES)


@each_case
def test_whole(fleet: Fleet, case: Case) -> None:
    check_form(fleet.whole("off", case), case)


@each_case
def test_streamed(fleet: Fleet, case: Case) -> None:
    assert fleet.streams("async")[case] == fleet.whole("off", case)


@each_case
def test_whole_among_all_others(fleet: Fleet, mode: str, case: Case) -> None:
    assert fleet.at_once(mode)[case][0] == fleet.whole("off", case)


@each_case
def test_streamed_among_all_others(fleet: Fleet, mode: str, case: Case) -> None:
    assert fleet.at_once(mode)[case][1] == fleet.whole("off", case)


def check_form(answer: Answer, case: Case) -> None:
    """Checks that every answer passes."""
    asked = case.asked
    assert sorted(answer.choices) == list(range(case.outputs))
    choices = answer.choices.values()
    assert {choice.finish_reason for choice in choices} <= {"stop", "length"}
    assert all(choice.stop_reason is None or choice.finish_reason == "stop" for choice in choices)
    assert answer.seed == asked.get("seed", 7)
    seeds = [choice.seed for choice in choices]
    assert seeds == [None] if case.outputs == 1 else seeds[0] == answer.seed
    usage = answer.usage
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    most = asked.get("max_completion_tokens") or asked["max_tokens"]
    limit = case.outputs * (16 if most is None else most)
    lengths = all(choice.finish_reason == "length" for choice in choices)
    assert usage["completion_tokens"] == limit if lengths else usage["completion_tokens"] < limit


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_drafts_guessed(fleet: Fleet, mode: str) -> None:
    cases = [case for case in CASES if case.drafts][::2]
    assert all(fleet.whole(mode, case) == fleet.whole("off", case) for case in cases)
    told = [fleet.whole(mode, case).drafts for case in cases]
    drafted = [drafts for drafts in told if drafts]
    least = 0.9 if mode == "sync" else 0.3  # a draft elsewhere may come too late for an output of few tokens
    assert len(drafted) >= least * len(told)
    assert sum(drafts["num_draft_tokens"] for drafts in drafted) > 100
    assert sum(drafts["num_accepted_draft_tokens"] for drafts in drafted) > 10


@each_case
def test_no_drafts_where_there_are_none(fleet: Fleet, case: Case) -> None:
    assert fleet.whole("off", case).drafts is None
    if not case.drafts:
        assert fleet.at_once("sync")[case][0].drafts is None
        assert fleet.at_once("async")[case][1].drafts is None
