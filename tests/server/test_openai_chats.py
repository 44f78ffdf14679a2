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


def test_token_ids_are_those_of_the_template_and_the_text(fleet: Fleet, mode: str) -> None:
    answer = fleet.whole(mode, chat("token-ids"))
    assert fleet.tokenizer.decode(answer.prompt_token_ids) == f"<user>{HELLO['content']}\n<assistant>"
    assert fleet.tokenizer.decode(answer.choices[0].token_ids) == answer.choices[0].text
    tokens = [entry["token"] for entry in fleet.whole(mode, chat("logprobs-by-id")).choices[0].logprobs["content"]]
    assert tokens == [f"token_id:{token}" for token in answer.choices[0].token_ids]


@pytest.mark.parametrize("name", ["n", "n-logprobs"])
def test_the_first_of_several_choices_is_the_only_one(fleet: Fleet, mode: str, name: str) -> None:
    several, only = fleet.whole(mode, chat(name)), fleet.whole(mode, chat(name, n=1))
    first, *others = several.choices.values()
    assert (first.text, first.logprobs) == (only.choices[0].text, only.choices[0].logprobs)
    seeds = {first.seed, *(choice.seed for choice in others)}
    assert first.seed == several.seed == only.seed and len(seeds) == len(several.choices)
    assert several.drafts is None


def test_max_completion_tokens_is_the_length(fleet: Fleet, mode: str) -> None:
    limited = fleet.whole(mode, chat("max-completion-tokens"))
    assert limited.usage["completion_tokens"] == 9 and limited.choices[0].finish_reason == "length"
    assert fleet.whole(mode, chat("sampled", max_tokens=9)) == limited


@pytest.mark.parametrize("name", ["stop", "stop-spanning", "stop-list"])
def test_a_stop_string_never_leaks(fleet: Fleet, mode: str, name: str) -> None:
    stop = fleet.arguments(chat(name))["stop"]
    choice = fleet.whole(mode, chat(name)).choices[0]
    whole = fleet.whole(mode, chat(name, stop=None)).choices[0].text
    stops = [stop] if isinstance(stop, str) else stop
    assert choice.finish_reason == "stop" and choice.stop_reason in stops
    assert whole.startswith(choice.text + str(choice.stop_reason)) and not any(s in choice.text for s in stops)


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


def test_half_characters_are_bytes(fleet: Fleet, mode: str) -> None:
    content = fleet.whole(mode, chat("logprobs-bytes")).choices[0].logprobs["content"]
    assert {entry["token"] for entry in content} == {"bytes:\\xc3", "bytes:\\xa9"}
    assert {tuple(entry["bytes"]) for entry in content} == {(0xC3,), (0xA9,)}


def test_logprobs_do_not_change_the_answer(fleet: Fleet, mode: str) -> None:
    assert fleet.whole(mode, chat("logprobs")).choices[0].text == fleet.whole(mode, chat("sampled")).choices[0].text
