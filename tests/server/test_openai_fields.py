"""Completions and chats through the official client: what fields ask for is in the answer."""

from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest
from openai_cases import CASES, HELLO, MODEL, Case, case
from openai_fleet import Fleet
from support import SNIPPETS

from pilotfish import LLM, SamplingParams


@pytest.fixture
def mode() -> str:
    """A single mode is enough: test_openai_cases compares them, and has asked this one."""
    return "off"


def variant(name: str, **changes: Any) -> Case:
    """A completion's case with other fields; None takes one away."""
    asked = {**case(name).asked, **changes}
    return Case(False, f"{name} {changes}", {field: value for field, value in asked.items() if value is not None})


# -- the offline engine

PARAMETERS = {field.name for field in fields(SamplingParams)}

OFFLINE = (
    *("greedy", "greedy-long", "sampled", "hot", "filters", "penalties", "logprobs-5", "n", "texts", "tokens"),
    *("top-p", "top-k", "min-p", "presence", "frequency", "repetition", "logit-bias", "allowed", "bad-words", "bytes"),
    *("stop", "stop-spanning", "stop-list", "stop-shown", "stop-token", "stop-token-shown", "stop-min-tokens"),
    *("eos", "eos-shown", "eos-min-tokens", "eos-ignored", "special-shown", "prompt-logprobs"),
)


@pytest.fixture(scope="module")
def offline(fleet: Fleet) -> LLM:
    return LLM(fleet.target, dtype="float32", threads=1, kv_slots=4096)


@pytest.mark.parametrize("name", OFFLINE)
def test_the_offline_engine_says_the_same(fleet: Fleet, mode: str, offline: LLM, name: str) -> None:
    asked = fleet.arguments(case(name))
    given = {name: value for name, value in {**asked, **asked["extra_body"]}.items() if name in PARAMETERS}
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    params = SamplingParams(**given)
    answer = fleet.whole(mode, case(name))
    whole = offline.generate(asked["prompt"], params)
    outputs = [output for prompt in whole for output in prompt.outputs]
    choices = [answer.choices[i] for i in range(len(outputs))]
    assert [choice.text for choice in choices] == [output.text for output in outputs]
    assert [choice.finish_reason for choice in choices] == [output.finish_reason for output in outputs]
    assert [answer.seed if choice.seed is None else choice.seed for choice in choices] == [o.seed for o in outputs]
    assert answer.usage["completion_tokens"] == sum(len(output.token_ids) for output in outputs)
    for choice, output in zip(choices, outputs, strict=True):
        assert choice.logprobs.get("token_logprobs", []) == [entry.logprob for entry in output.logprobs or []]


# -- prompts


def test_a_text_and_its_tokens_are_one_prompt(fleet: Fleet, mode: str) -> None:
    tokens = fleet.tokenizer.encode(SNIPPETS[0])
    for prompt in (tokens, [SNIPPETS[0]], [tokens]):
        assert fleet.whole(mode, variant("sampled", prompt=prompt)) == fleet.whole(mode, case("sampled"))


def test_each_prompt_of_a_list_is_answered_as_if_alone(fleet: Fleet, mode: str) -> None:
    several = fleet.whole(mode, case("texts"))
    alone = [fleet.whole(mode, variant("sampled", prompt=prompt)) for prompt in SNIPPETS]
    assert [several.choices[i].text for i in range(len(SNIPPETS))] == [answer.choices[0].text for answer in alone]
    assert several.usage["prompt_tokens"] == sum(answer.usage["prompt_tokens"] for answer in alone)


def test_echo_repeats_the_prompt(fleet: Fleet, mode: str) -> None:
    for name in ("echo", "echo-unicode", "echo-logprobs"):
        prompt = case(name).asked["prompt"]
        without = fleet.whole(mode, variant(name, echo=None)).choices[0]
        assert fleet.whole(mode, case(name)).choices[0].text == prompt + without.text
    assert fleet.whole(mode, case("echo-only")).choices[0].text == SNIPPETS[0]
    assert fleet.whole(mode, case("echo-only")).usage["completion_tokens"] == 0


def test_echo_scores_the_prompt_as_the_model_does_in_an_output(fleet: Fleet, mode: str) -> None:
    """A greedy output, sent as a prompt, has the log-probabilities of the output."""
    said = fleet.whole(mode, case("logprobs-0")).choices[0]
    tokens = fleet.tokenizer.encode(SNIPPETS[0])
    given = fleet.whole(mode, variant("logprobs-0", max_tokens=1, stop_token_ids=None, allowed_token_ids=None))
    assert given.choices[0].logprobs["token_logprobs"][0] == said.logprobs["token_logprobs"][0]
    scored = fleet.whole(mode, case("echo-only-logprobs")).choices[0].logprobs
    assert scored["token_logprobs"][0] is None and scored["top_logprobs"][0] is None
    assert all(logprob <= 0 for logprob in scored["token_logprobs"][1:])
    echoed = fleet.whole(mode, case("echo-logprobs")).choices[0].logprobs
    assert "".join(echoed["tokens"][: len(tokens)]) == SNIPPETS[0]


# -- several outputs


def test_several_outputs_have_seeds_of_their_own(fleet: Fleet, mode: str) -> None:
    choices = fleet.whole(mode, case("n")).choices.values()
    assert len({choice.seed for choice in choices}) == len({choice.text for choice in choices}) == 3
    for choice in choices:
        assert fleet.whole(mode, variant("sampled", seed=choice.seed)).choices[0].text == choice.text


def test_a_drawn_seed_is_told_and_gives_the_same_again(fleet: Fleet, mode: str) -> None:
    create = fleet.client(mode).completions.create
    asked: dict[str, Any] = {"model": MODEL, "prompt": SNIPPETS[0], "max_tokens": 24}
    drawn, other = create(**asked), create(**asked)
    again = create(**asked, seed=drawn.seed)
    assert drawn.seed != other.seed and drawn.choices[0].text != other.choices[0].text
    assert again.choices[0].text == drawn.choices[0].text
    assert again.seed == drawn.seed and max(drawn.seed, other.seed) < 2**53


# -- ends


@pytest.mark.parametrize("name", ["stop", "stop-spanning", "stop-list", "logprobs-stop"])
def test_a_stop_string_ends_the_text_before_itself(fleet: Fleet, mode: str, name: str) -> None:
    stop = fleet.arguments(case(name))["stop"]
    whole = fleet.whole(mode, variant(name, stop=None)).choices[0].text
    choice = fleet.whole(mode, case(name)).choices[0]
    assert choice.finish_reason == "stop" and choice.stop_reason in ([stop] if isinstance(stop, str) else stop)
    assert choice.text == whole[: whole.index(choice.stop_reason)] != ""


def test_a_stop_token_ends_an_output_and_is_named(fleet: Fleet, mode: str) -> None:
    choice = fleet.whole(mode, case("stop-token")).choices[0]
    assert choice.finish_reason == "stop" and choice.stop_reason in range(40, 56)


# -- log-probabilities

SCORED = [
    each for each in CASES if not each.chat and each.asked.get("logprobs") is not None and each.name != "logprobs-by-id"
]


@pytest.mark.parametrize("scored", SCORED, ids=str)
def test_logprobs_are_of_the_text(fleet: Fleet, mode: str, scored: Case) -> None:
    for choice in fleet.whole(mode, scored).choices.values():
        logprobs = choice.logprobs
        tokens, offsets = logprobs["tokens"], logprobs["text_offset"]
        assert len(tokens) == len(offsets) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) > 0
        text = choice.text  # offsets are of the text before a stop string was cut off
        if isinstance(choice.stop_reason, str) and not scored.asked.get("include_stop_str_in_output"):
            text += choice.stop_reason
        assert offsets[0] == 0 and all(a <= b for a, b in pairwise(offsets)) and offsets[-1] <= len(text)
        for token, offset in zip(tokens, offsets, strict=True):
            shown = text[offset:].lstrip("\ufffd")  # what remained of half characters before it
            assert token.startswith(("bytes:", shown)) or shown.startswith(token)
        for token, logprob, top in zip(tokens, logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
            if logprob is not None:
                assert logprob <= 0 and top[token] == logprob
                assert scored.asked["logprobs"] <= len(top) <= scored.asked["logprobs"] + 1
                assert all(each <= 0 for each in top.values())


# -- chats


def test_a_chat_is_a_completion_of_the_template(fleet: Fleet, mode: str) -> None:
    prompt = f"<user>{HELLO['content']}\n<assistant>"
    asked = {**case("sampled").asked, "prompt": prompt}
    completion = fleet.whole(mode, Case(False, "template", asked))
    answer = fleet.whole(mode, case("sampled", chat=True))
    assert answer.choices[0].text == completion.choices[0].text
    assert answer.usage == completion.usage and answer.fingerprint == completion.fingerprint


SCORED_CHATS = [each for each in CASES if each.chat and each.asked.get("logprobs")]


@pytest.mark.parametrize("scored", SCORED_CHATS, ids=str)
def test_logprobs_of_a_chat_are_of_the_text(fleet: Fleet, mode: str, scored: Case) -> None:
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
