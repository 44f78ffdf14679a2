"""A published model, as `pilotfish models get smollm2` has it from the package index, with the head that ships for it:
what tiny random models cannot show."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from inline_server import inline_server
from live import HttpServer
from published import library_model
from support import CORPUS, MODES, assert_idle, drain, make_engine, params, run, sure_tokens

from pilotfish.engine.engine import Engine
from pilotfish.engine.pairs import PairDirs, resolve_pair
from pilotfish.engine.pairs.directories import published_file
from pilotfish.engine.sample import Sample
from pilotfish.prompts import chat_prompt

SMOLLM2 = published_file("smollm2")
pytestmark = pytest.mark.skipif(not SMOLLM2.exists(), reason="`pilotfish models get smollm2` has not been run")

TEXTS = [
    *("The capital of France is", "Once upon a time, in a land far away,", "1, 2, 3, 4,", "Dear Sir or Madam,\n\n"),
    *(
        "def fibonacci(n):\n    ",
        "SELECT name FROM",
        "<html>\n<head>",
        '{"name": "Ada", "born":',
        "#include <stdio.h>\n",
    ),
    *(
        "Die Hauptstadt von Deutschland",
        "La vie est",
        "El perro",
        "日本の首都は",
        "Привет, ",
        "Ελλάδα",
        "سلام",
        "नमस्ते",
        "👋🏽 ",
    ),
]
QUESTIONS = ["What is the capital of France?", "Write a haiku about the sea.", "Count from 1 to 20."]


@pytest.fixture(scope="module")
def pair() -> PairDirs:
    return resolve_pair("smollm2")


@pytest.fixture(scope="module")
def plain(pair: PairDirs) -> Engine:
    return make_engine(pair.target)


@pytest.fixture(scope="module")
def server(pair: PairDirs) -> Iterator[HttpServer]:
    with inline_server(pair.target, draft=pair.draft, mode="sync", drafter="lm+ngram") as server:
        yield server


def chats(engine: Engine) -> list[list[int]]:
    return [chat_prompt([{"role": "user", "content": text}], engine.tokenizer) for text in QUESTIONS]


def test_greedy_tokens_are_those_of_transformers(plain: Engine) -> None:
    """On 20 prompts, two of them long; where its two best logits are nearly equal, the machine decides."""
    library, ids = library_model(SMOLLM2), plain.tokenizer.encode(CORPUS[0])
    prompts = [*map(plain.tokenizer.encode, TEXTS), ids[:700], ids[:1500]]
    outputs = run(plain, prompts, [params(temperature=0.0, max_tokens=16)] * len(prompts))
    expected = [sure_tokens(library, prompt, 16, close=1e-3) for prompt in prompts]
    assert len(prompts) == 20 and sum(map(len, expected)) > 15 * len(prompts)
    for output, sure in zip(outputs, expected, strict=True):
        assert output[: len(sure)] == sure


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "off"])
def test_speculation_changes_no_token(pair: PairDirs, dtype: str, mode: str) -> None:
    asked = [params(temperature=t, max_tokens=40, seed=i) for i, t in enumerate((1.2, 0.8, 0.0))]
    draft = {"draft": pair.draft} if "lm" in MODES[mode]["drafter"] else {}
    outputs, accepted = [], 0
    for options in ({}, {**MODES[mode], **draft}):
        engine = make_engine(pair.target, dtype=dtype, **options)
        samples = [s for prompt, p in zip(chats(engine), asked, strict=True) for s in engine.submit(prompt, p)]
        drain(engine)
        outputs.append([sample.token_ids for sample in samples])
        accepted = sum(sample.request.stats.accepted_tokens for sample in samples)
        engine.close()
    assert outputs[0] == outputs[1] and accepted


def test_a_stop_string_across_tokens(plain: Engine) -> None:
    """Made of a token's last character and the first one of the next."""
    (prompt, *_), tokenizer = chats(plain), plain.tokenizer
    asked = params(temperature=0.0, max_tokens=40)
    (whole,) = plain.submit(prompt, asked)
    drain(plain)
    pieces = [tokenizer.decode([token]) for token in whole.token_ids]
    stops = {
        left[-1] + right[0] for left, right in pairwise(pieces) if left.isascii() and right.isascii() and left and right
    }
    within = [stop for stop in stops if stop in whole.text]  # others end in a special token
    assert len(within) > 2
    for stop in within:
        (cut,) = plain.submit(prompt, replace(asked, stop=(stop,)))
        drain(plain)
        assert cut.finish_reason == "stop" and cut.text == whole.text.partition(stop)[0]
    assert_idle(plain)


def test_no_character_is_cut(plain: Engine) -> None:
    """Sampled without mercy, so that scripts mix and bytes of a character come one by one."""
    asked = params(temperature=1.8, max_tokens=60)
    samples = [s for text in TEXTS[-6:] for s in plain.submit(text, asked)]
    pieces: dict[Sample, list[str]] = {sample: [] for sample in samples}
    while plain.busy:
        for sample, delta in plain.advance().items():
            pieces[sample].append(delta.text)
    for sample in samples:
        whole = plain.tokenizer.decode(sample.token_ids, skip_special_tokens=True)
        assert "".join(pieces[sample]) == sample.text == whole.rstrip("\ufffd")  # the last one may be begun
    assert any("\ufffd" in plain.tokenizer.decode([token]) for sample in samples for token in sample.token_ids)


def ask(server: HttpServer, question: str, ends: str = "stop", **fields: Any) -> Any:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 60}
    status, answer = server.post("/v1/chat/completions", {**body, **fields})
    assert status == 200 and answer["choices"][0]["finish_reason"] == ends, answer
    return answer["choices"][0]["message"]


def test_it_answers_a_chat(server: HttpServer) -> None:
    """And ends where its turn does."""
    assert ask(server, QUESTIONS[0])["content"] == "The capital of France is Paris."


def test_a_schema_holds(server: HttpServer) -> None:
    fields = {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}}
    schema = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    told = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
    said = json.loads(
        ask(server, "Name a large city in Asia, and how many live there.", response_format=told)["content"]
    )
    assert said.keys() == fields.keys() and isinstance(said["people"], int) and len(said["city"]) <= 20


def test_a_required_tool_is_called(server: HttpServer) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    (call,) = ask(server, "How is the weather in Oslo?", ends="tool_calls", tools=[tool], tool_choice="required")[
        "tool_calls"
    ]
    assert call["function"]["name"] == "get_weather" and isinstance(
        json.loads(call["function"]["arguments"])["city"], str
    )
