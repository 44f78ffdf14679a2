"""The official client gives one answer to a request, whatever the mode, the load, and the way it is sent."""

import pytest
from openai_cases import CASES, Case, case
from openai_fleet import MODES, STREAMED, Answer, Fleet
from structured_cases import CHECKED

each_case = pytest.mark.parametrize("case", CASES, ids=str)


@each_case
def test_one_answer(fleet: Fleet, mode: str, case: Case) -> None:
    """Whole and alone, and streamed among all others."""
    alone = fleet.whole("off", case)
    check_form(alone, case)
    for streamed in STREAMED:
        together = fleet.at_once(mode, streamed)[case]
        assert together == alone
        if mode == "off" or not case.drafts:
            assert alone.drafts is together.drafts is None


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


@pytest.mark.parametrize("mode", MODES[1:])
def test_drafts_guessed(fleet: Fleet, mode: str) -> None:
    told = [fleet.at_once(mode, True)[case].drafts for case in CASES if case.drafts]
    drafted = [drafts for drafts in told if drafts]
    least = 0.9 if mode == "sync" else 0.3  # a draft elsewhere may come too late for an output of few tokens
    assert len(drafted) >= least * len(told)
    assert sum(drafts["num_draft_tokens"] for drafts in drafted) > 100
    assert sum(drafts["num_accepted_draft_tokens"] for drafts in drafted) > 10


# -- JSON, choices, expressions, grammars and calls, of the bundled pair


@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_outputs_are_what_they_must_be_and_equal(bundled: Fleet, mode: str, case: Case) -> None:
    plain = bundled.at_once("off", False)[case]
    for choice in plain.choices.values():
        CHECKED[case](choice)
    for streamed in STREAMED:
        assert bundled.at_once(mode, streamed)[case] == plain


# -- chunks


@pytest.mark.parametrize("mode", MODES[1:])
def test_chunks_tell_what_was_speculated(fleet: Fleet, mode: str) -> None:
    body = {**fleet.arguments(case("greedy-long"))["extra_body"], "speculation": {"detail": True}}
    asked = {**fleet.arguments(case("greedy-long")), "extra_body": body, "stream": True}
    with fleet.client(mode).completions.create(**asked) as stream:
        details = [chunk.model_extra["pilotfish"] for chunk in stream]
    tokens = [token for detail in details for token in detail["tokens"]]
    verified = [entry for detail in details for entry in detail["verified"]]
    assert fleet.tokenizer.decode(tokens) == fleet.whole("off", case("greedy-long")).choices[0].text
    assert sum(entry["tokens"] for entry in verified) == len(tokens) == 96
    assert sum(entry["accepted"] for entry in verified) > 0


# -- speculation


def test_speculation_is_the_requests_to_choose(fleet: Fleet, mode: str) -> None:
    plain = fleet.whole("off", case("sampled-long"))
    for speculation in ({"mode": "off"}, {"mode": mode}, {"max_nodes": 0}, {"metrics": "none"}):
        body = {"speculation": speculation}
        answer = fleet.client(mode).completions.create(**{**fleet.arguments(case("sampled-long")), "extra_body": body})
        assert answer.choices[0].text == plain.choices[0].text
        metrics = answer.model_extra["metrics"] if speculation != {"metrics": "none"} else None
        drafted = bool(metrics and metrics["speculative_decoding"])
        assert drafted == (speculation == {"mode": mode} and mode != "off")
        assert ("metrics" in answer.model_extra) == (speculation != {"metrics": "none"})
