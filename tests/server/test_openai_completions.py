"""Completions through the official client: what fields ask for is in the answer."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from openai_cases import CASES, EOS, MODEL, SPANNING, Case, case
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

OFFLINE = ("greedy", "greedy-long", "sampled", "hot", "filters", "penalties", "logprobs-5", "n", "texts", "tokens")


@pytest.fixture(scope="module")
def offline(fleet: Fleet) -> LLM:
    return LLM(fleet.target, dtype="float32", threads=1, kv_slots=4096)


@pytest.mark.parametrize("name", OFFLINE)
def test_the_offline_engine_says_the_same(fleet: Fleet, mode: str, offline: LLM, name: str) -> None:
    asked = case(name).asked
    params = SamplingParams(seed=7, **{field: value for field, value in asked.items() if field != "prompt"})
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


def test_token_ids_are_those_of_prompt_and_text(fleet: Fleet, mode: str) -> None:
    answer = fleet.whole(mode, case("token-ids-n"))
    for i, choice in answer.choices.items():
        assert choice.prompt_token_ids == fleet.tokenizer.encode(SNIPPETS[i // 2])
        assert choice.text == fleet.tokenizer.decode(choice.token_ids, skip_special_tokens=True)
    stopped = fleet.whole(mode, case("token-ids-stop"))
    assert len(stopped.choices[0].token_ids) == stopped.usage["completion_tokens"] < 48
    named = fleet.whole(mode, case("logprobs-by-id")).choices[0].logprobs["tokens"]
    plain = fleet.whole(mode, variant("token-ids", return_token_ids=True)).choices[0].token_ids
    assert named == [f"token_id:{token}" for token in plain]


def test_a_truncated_prompt_is_its_end_or_its_beginning(fleet: Fleet, mode: str) -> None:
    tokens = fleet.tokenizer.encode("".join(SNIPPETS))
    ended = fleet.whole(mode, case("truncated"))
    assert ended.choices[0].prompt_token_ids == tokens[-9:] and ended.usage["prompt_tokens"] == 9
    given = fleet.whole(mode, variant("truncated", prompt=tokens[-9:], truncate_prompt_tokens=None))
    assert given == ended
    begun = fleet.whole(mode, case("truncated-echo"))
    assert begun.choices[0].text.startswith(fleet.tokenizer.decode(tokens[:7]))


# -- several outputs


@pytest.mark.parametrize("name", ["n", "n-logprobs", "echo-n-logprobs"])
def test_the_first_of_several_outputs_is_the_only_one(fleet: Fleet, mode: str, name: str) -> None:
    several, only = fleet.whole(mode, case(name)), fleet.whole(mode, variant(name, n=1))
    assert several.choices[0].text == only.choices[0].text
    assert several.choices[0].logprobs == only.choices[0].logprobs
    assert several.seed == only.seed == several.choices[0].seed


def test_several_outputs_have_seeds_of_their_own(fleet: Fleet, mode: str) -> None:
    choices = fleet.whole(mode, case("n")).choices.values()
    assert len({choice.seed for choice in choices}) == len({choice.text for choice in choices}) == 3
    for choice in choices:
        assert fleet.whole(mode, variant("sampled", seed=choice.seed)).choices[0].text == choice.text


def test_a_seed_is_a_number_or_its_digits(fleet: Fleet, mode: str) -> None:
    digits, number = fleet.whole(mode, case("seed-as-text")), fleet.whole(mode, variant("seed-largest", n=2))
    assert [choice.text for choice in digits.choices.values()] == [choice.text for choice in number.choices.values()]
    assert (digits.seed, number.seed) == (str(2**64 - 1), 2**64 - 1)
    assert digits.choices[1].seed == str(number.choices[1].seed) and number.choices[1].seed < 2**53


def test_a_drawn_seed_is_told_and_gives_the_same_again(fleet: Fleet, mode: str) -> None:
    create = fleet.client(mode).completions.create
    asked: dict[str, Any] = {"model": MODEL, "prompt": SNIPPETS[0], "max_tokens": 24}
    drawn, other = create(**asked), create(**asked)
    again = create(**asked, seed=drawn.seed)
    assert drawn.seed != other.seed and drawn.choices[0].text != other.choices[0].text
    assert again.choices[0].text == drawn.choices[0].text
    assert again.seed == drawn.seed and max(drawn.seed, other.seed) < 2**53


# -- ends


@pytest.mark.parametrize("name", ["stop", "stop-spanning", "stop-greedy", "stop-list", "logprobs-stop"])
def test_a_stop_string_ends_the_text_before_itself(fleet: Fleet, mode: str, name: str) -> None:
    stop = fleet.arguments(case(name))["stop"]
    whole = fleet.whole(mode, variant(name, stop=None)).choices[0].text
    choice = fleet.whole(mode, case(name)).choices[0]
    assert choice.finish_reason == "stop" and choice.stop_reason in ([stop] if isinstance(stop, str) else stop)
    assert choice.text == whole[: whole.index(choice.stop_reason)] != ""


@pytest.mark.parametrize("name", ["stop-shown", "stop-list-shown"])
def test_a_stop_string_may_show(fleet: Fleet, mode: str, name: str) -> None:
    hidden = fleet.whole(mode, variant(name, include_stop_str_in_output=None)).choices[0]
    shown = fleet.whole(mode, case(name)).choices[0]
    assert shown.stop_reason == hidden.stop_reason and shown.text == hidden.text + str(hidden.stop_reason)


def test_a_stop_token_may_show(fleet: Fleet, mode: str) -> None:
    hidden = fleet.whole(mode, case("stop-token")).choices[0]
    shown = fleet.whole(mode, case("stop-token-shown")).choices[0]
    assert shown.stop_reason == hidden.stop_reason
    assert shown.text == hidden.text + fleet.tokenizer.decode([shown.stop_reason])


def test_special_tokens_may_show(fleet: Fleet, mode: str) -> None:
    shown, hidden = (fleet.whole(mode, case(name)).choices[0] for name in ("eos-shown", "eos"))
    assert shown.text == hidden.text + "<eos>"
    assert fleet.whole(mode, case("eos-special-hidden")).choices[0].text == hidden.text
    assert "<eos>" in fleet.whole(mode, case("special-shown")).choices[0].text


def test_the_stop_string_spans_tokens(fleet: Fleet, mode: str) -> None:
    stopping = case("logprobs-stop")
    assert stopping.asked["stop"] is SPANNING
    tokens = fleet.whole(mode, stopping).choices[0].logprobs["tokens"]
    assert not any(fleet.arguments(stopping)["stop"] in token for token in tokens)


def test_min_tokens_put_off_ends(fleet: Fleet, mode: str) -> None:
    for name, least in (("stop-min-tokens", 20), ("stop-token-min-tokens", 30), ("eos-min-tokens", 12)):
        early = fleet.whole(mode, variant(name, min_tokens=None))
        assert early.usage["completion_tokens"] < least <= fleet.whole(mode, case(name)).usage["completion_tokens"]


def test_a_stop_token_ends_an_output_and_is_named(fleet: Fleet, mode: str) -> None:
    choice = fleet.whole(mode, case("stop-token")).choices[0]
    assert choice.finish_reason == "stop" and choice.stop_reason in range(40, 56)


def test_the_end_of_sequence_ends_an_output_and_is_not_shown(fleet: Fleet, mode: str) -> None:
    ended = fleet.whole(mode, case("eos"))
    assert ended.choices[0].finish_reason == "stop" and ended.choices[0].stop_reason is None
    assert ended.usage["completion_tokens"] < 64 and "<eos>" not in ended.choices[0].text
    ignored = fleet.whole(mode, variant("eos", ignore_eos=True, logprobs=0)).choices[0]
    assert ignored.finish_reason == "length" and fleet.tokenizer.decode([EOS]) in ignored.logprobs["tokens"]


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


def test_more_logprobs_do_not_change_the_output(fleet: Fleet, mode: str) -> None:
    plain, scored = fleet.whole(mode, case("sampled")), fleet.whole(mode, case("logprobs-5"))
    assert plain.choices[0].text == scored.choices[0].text
    fewer = fleet.whole(mode, variant("logprobs-5", logprobs=0)).choices[0].logprobs
    assert fewer["token_logprobs"] == scored.choices[0].logprobs["token_logprobs"]


def test_a_greedy_token_is_the_likeliest(fleet: Fleet, mode: str) -> None:
    logprobs = fleet.whole(mode, variant("logprobs-0", logprobs=5)).choices[0].logprobs
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert top[token] == max(top.values())


def test_prompt_logprobs(fleet: Fleet, mode: str) -> None:
    first, *others = fleet.whole(mode, case("prompt-logprobs")).choices[0].prompt_logprobs
    tokens = fleet.tokenizer.encode(SNIPPETS[0])
    assert first is None and len(others) == len(tokens) - 1
    for token, entries in zip(tokens[1:], others, strict=True):
        assert 2 <= len(entries) <= 3 and entries[str(token)]["logprob"] <= 0
        assert entries[str(token)]["decoded_token"] == fleet.tokenizer.decode([token])


# -- fields that shape the distribution


@pytest.mark.parametrize(
    "name", ["top-p", "top-k", "min-p", "penalties", "logit-bias", "allowed", "bad-words", "presence", "repetition"]
)
def test_the_field_has_an_effect(fleet: Fleet, mode: str, name: str) -> None:
    ours = {"top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
    names = ours | {"logit_bias", "allowed_token_ids", "bad_words"}
    without = variant(name, **dict.fromkeys(names & case(name).asked.keys()))
    assert fleet.whole(mode, case(name)).choices[0].text != fleet.whole(mode, without).choices[0].text


def test_half_characters_are_put_together(fleet: Fleet, mode: str) -> None:
    text = fleet.whole(mode, case("bytes")).choices[0].text
    assert "é" in text and set(text) == {"é", "\ufffd"}
