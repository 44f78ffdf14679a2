"""Chats through the official client: messages, choices, log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest
from openai_cases import CASES, HELLO, Case, case
from openai_fleet import Fleet


@pytest.fixture
def mode() -> str:
    """A single mode is enough: test_openai_cases compares them, and has asked this one."""
    return "off"


def chat(name: str, **changes: Any) -> Case:
    """A chat's case with other fields; None takes one away."""
    asked = {**case(name, chat=True).asked, **changes}
    return Case(True, f"{name} {changes}", {field: value for field, value in asked.items() if value is not None})


def test_a_chat_is_a_completion_of_the_template(fleet: Fleet, mode: str) -> None:
    prompt = f"<user>{HELLO['content']}\n<assistant>"
    asked = {**case("sampled").asked, "prompt": prompt}
    completion = fleet.whole(mode, Case(False, "template", asked))
    answer = fleet.whole(mode, chat("sampled"))
    assert answer.choices[0].text == completion.choices[0].text
    assert answer.usage == completion.usage and answer.fingerprint == completion.fingerprint


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
