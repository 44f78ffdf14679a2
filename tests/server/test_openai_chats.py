"""Chats through the official client: messages, choices, log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest
from openai_cases import CASES, HELLO, TURNS, Case, case
from openai_fleet import Fleet


@pytest.fixture
def mode() -> str:
    """A single mode is enough: test_openai_cases compares them, and has asked this one."""
    return "off"


def chat(name: str, **changes: Any) -> Case:
    """A chat's case with other fields; None takes one away."""
    asked = {**case(name, chat=True).asked, **changes}
    return Case(True, f"{name} {changes}", {field: value for field, value in asked.items() if value is not None})


def test_developer_is_system_and_parts_are_lines(fleet: Fleet, mode: str) -> None:
    assert fleet.whole(mode, chat("developer")) == fleet.whole(mode, chat("system"))
    lines = [{"role": "user", "content": "Say\nhello."}]
    assert fleet.whole(mode, chat("parts")) == fleet.whole(mode, chat("sampled", messages=lines))


def test_every_turn_counts(fleet: Fleet, mode: str) -> None:
    answers = [fleet.whole(mode, chat("sampled", messages=TURNS[i:])) for i in range(len(TURNS))]
    assert len({answer.choices[0].text for answer in answers}) == len(TURNS)
    lengths = [answer.usage["prompt_tokens"] for answer in answers]
    assert lengths == sorted(lengths, reverse=True)


def test_a_chat_is_a_completion_of_the_template(fleet: Fleet, mode: str) -> None:
    prompt = f"<user>{HELLO['content']}\n<assistant>"
    asked = {**case("sampled").asked, "prompt": prompt}
    completion = fleet.whole(mode, Case(False, "template", asked))
    answer = fleet.whole(mode, chat("sampled"))
    assert answer.choices[0].text == completion.choices[0].text
    assert answer.usage == completion.usage and answer.fingerprint == completion.fingerprint


def test_an_echo_begins_the_answer(fleet: Fleet, mode: str) -> None:
    plain = fleet.whole(mode, chat("echo", echo=None)).choices[0].text
    assert fleet.whole(mode, chat("echo")).choices[0].text == TURNS[2]["content"] + plain
    continued = fleet.whole(mode, chat("continued")).choices[0].text
    assert fleet.whole(mode, chat("continued-echo")).choices[0].text == TURNS[2]["content"] + continued


def test_the_template_is_told_what_it_is_asked_for(fleet: Fleet, mode: str) -> None:
    begun = "".join(f"<{turn['role']}>{turn['content']}\n" for turn in TURNS[:2])
    for name, prompt in (
        ("continued", f"{begun}<assistant>print('hello')"),
        ("no-generation-prompt", f"<user>{HELLO['content']}\n"),
        ("template-kwargs", f"Calm. <user>{HELLO['content']}\n<assistant>"),
    ):
        completion = fleet.whole(mode, Case(False, name, {**case("sampled").asked, "prompt": prompt}))
        assert fleet.whole(mode, chat(name)).choices[0].text == completion.choices[0].text


SCORED = [each for each in CASES if each.chat and each.asked.get("logprobs")]


@pytest.mark.parametrize("scored", SCORED, ids=str)
def test_logprobs_are_of_the_text(fleet: Fleet, mode: str, scored: Case) -> None:
    most = scored.asked.get("top_logprobs", 0)
    for choice in fleet.whole(mode, scored).choices.values():
        content = choice.logprobs["content"]
        said = b"".join(bytes(entry["bytes"]) for entry in content)
        assert said.decode(errors="replace") == choice.text
        for entry in content:
            top = [likely["logprob"] for likely in entry["top_logprobs"]]
            assert entry["logprob"] <= 0 and len(top) == most
            assert top == sorted(top, reverse=True) and all(entry["logprob"] <= likely for likely in top[:1])
            told = {likely["token"]: likely["logprob"] for likely in entry["top_logprobs"]}
            assert told.get(entry["token"], entry["logprob"]) == entry["logprob"]
