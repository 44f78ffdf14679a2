"""vLLM's parameters of prompts and answers, over an engine that says what it was told to."""

import json
from typing import Any

import pytest
from http_double import CHAT, COMPLETIONS, USER, Client, Engine, saying
from pages import codes, table

from pilotfish.server.observe.metrics import ServerMetrics

BEGUN = {"role": "assistant", "content": "The answer"}
TEMPLATE = (
    "{{ tone }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def templated(engine: Engine) -> Engine:
    """Its chat template knows of ends, of a tone and of whether an answer is to begin."""
    engine.tokenizer.chat_template = TEMPLATE
    return engine


# -- seeds


@pytest.mark.parametrize("seed", [0, 7, 2**53 + 1, 2**64 - 1])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_seed_is_answered_as_it_was_given(client: Client, engine: Engine, path: str, seed: int) -> None:
    for given in (seed, str(seed)):
        fields = {"seed": given, "prompt": "x"} if path == COMPLETIONS else {"seed": given, "messages": [USER]}
        body = client.post(path, fields).json
        assert body["seed"] == given and type(body["seed"]) is type(given)
        assert engine.submitted[-1].params.seed == seed
        assert client.post(path, {**fields, "stream": True}).events[0]["seed"] == given


def test_a_seed_of_minus_one_is_none(client: Client, engine: Engine) -> None:
    assert client.post(COMPLETIONS, {"prompt": "x", "seed": -1}).json["seed"] == 100
    assert engine.submitted[-1].params.seed is None


def test_seeds_of_several_outputs_are_text_too(client: Client) -> None:
    body = client.post(COMPLETIONS, {"prompt": "x", "n": 2, "seed": "5"}).json
    assert (body["seed"], [choice["seed"] for choice in body["choices"]]) == ("5", ["5", "6"])


# -- tokens


def test_token_ids_of_completions(client: Client, tokenizer: Any) -> None:
    fields = {"prompt": ["def", [5, 6]], "n": 2, "return_token_ids": True}
    texts, prompts = ["import os", "return x"] * 2, [tokenizer.encode("def")] * 2 + [[5, 6]] * 2
    whole = client.post(COMPLETIONS, fields).json["choices"]
    assert [choice["token_ids"] for choice in whole] == [tokenizer.encode(text) for text in texts]
    assert [choice["prompt_token_ids"] for choice in whole] == prompts
    events = client.post(COMPLETIONS, {**fields, "stream": True}).events
    for i, choice in enumerate(whole):
        parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == i]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        assert [part.get("prompt_token_ids") for part in parts] == [prompts[i]] + [None] * (len(parts) - 1)
    assert "token_ids" not in client.post(COMPLETIONS, {"prompt": "x"}).json["choices"][0]


def test_token_ids_of_chats(client: Client, engine: Engine, tokenizer: Any) -> None:
    fields = {"messages": [USER], "n": 2, "return_token_ids": True}
    body = client.post(CHAT, fields).json
    assert body["prompt_token_ids"] == engine.submitted[0].tokens
    assert [tokenizer.decode(choice["token_ids"]) for choice in body["choices"]] == ["import os", "return x"]
    events = client.post(CHAT, {**fields, "stream": True}).events
    assert [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event] == [body["prompt_token_ids"]]
    for i, choice in enumerate(body["choices"]):
        parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == i]
        assert [token for part in parts for token in part.get("token_ids", [])] == choice["token_ids"]


def test_tokens_without_text_are_told_of_at_once(client: Client, engine: Engine) -> None:
    engine.script = saying(engine.tokenizer, "☯", at_a_time=1)
    events = client.post(COMPLETIONS, {"prompt": "x", "return_token_ids": True, "stream": True}).events
    assert [len(event["choices"][0]["token_ids"]) for event in events] == [1] * len(events) and len(events) > 1


def test_only_the_prompt_has_no_tokens_of_its_own(client: Client) -> None:
    fields = {"prompt": [40, 41], "echo": True, "max_tokens": 0, "return_token_ids": True}
    (choice,) = client.post(COMPLETIONS, fields).json["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([40, 41], [])


def test_logprobs_may_name_tokens_by_id(client: Client, tokenizer: Any) -> None:
    ids = tokenizer.encode("import os")
    named = [f"token_id:{token}" for token in ids]
    fields = {"prompt": [40, 41], "logprobs": 1, "echo": True, "return_tokens_as_token_ids": True}
    logprobs = client.post(COMPLETIONS, fields).json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:40", "token_id:41", *named]
    assert logprobs["top_logprobs"][2] == {"token_id:40": -41.0, named[0]: -1.5}
    assert logprobs["text_offset"][:3] == [0, 1, 2]  # those of the text
    chat = {"messages": [USER], "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    content = client.post(CHAT, chat).json["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == named
    assert bytes(byte for entry in content for byte in entry["bytes"]) == b"import os"
    assert content[0]["top_logprobs"] == [{"token": "token_id:40", "logprob": -41.0, "bytes": [72]}]


# -- prompts


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, [7, 8, 9]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, [7, 8, 9]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [5, 6, 7]),
        ({"truncate_prompt_tokens": 9}, [5, 6, 7, 8, 9]),
        ({"truncate_prompt_tokens": -1}, [5, 6, 7, 8, 9]),
        ({"truncation_side": "right"}, [5, 6, 7, 8, 9]),
    ],
)
def test_a_prompt_may_be_cut(client: Client, engine: Engine, fields: dict[str, Any], kept: list[int]) -> None:
    body = client.post(COMPLETIONS, {"prompt": [5, 6, 7, 8, 9], "echo": True, "return_token_ids": True, **fields}).json
    assert engine.submitted[0].tokens == kept == body["choices"][0]["prompt_token_ids"]
    assert body["usage"]["prompt_tokens"] == len(kept)
    assert body["choices"][0]["text"] == engine.tokenizer.decode(kept) + "import os"


@pytest.mark.parametrize(
    ("limits", "kept"),
    [({}, 240), ({"max_tokens": 56}, 200), ({"max_tokens": 4, "min_tokens": 2}, 252), ({"max_tokens": 255}, 1)],
)
def test_a_prompt_may_be_cut_to_what_fits(client: Client, engine: Engine, limits: dict[str, int], kept: int) -> None:
    fields = {"prompt": [[5] * 300, [6] * 2], "truncate_prompt_tokens": -1}
    assert client.post(COMPLETIONS, {**fields, **limits}).status == 200
    assert [len(each.tokens) for each in engine.submitted] == [kept, min(kept, 2)]


def test_a_limit_that_leaves_no_prompt_is_to_blame(client: Client) -> None:
    fields = {"prompt": [5] * 300, "truncate_prompt_tokens": -1, "max_tokens": 256}
    answer = client.post(COMPLETIONS, fields)
    assert (answer.status, answer.error["param"]) == (400, "max_tokens")


def test_a_chat_may_be_cut(client: Client, engine: Engine) -> None:
    long = {"role": "user", "content": "a b c " * 100}
    assert client.post(CHAT, {"messages": [long]}).error["param"] == "messages"
    assert client.post(CHAT, {"messages": [long], "truncate_prompt_tokens": -1}).status == 200
    assert len(engine.submitted[0].tokens) == 255 and engine.prompt.endswith("<assistant>")


# -- chats


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("turns", "begins"), [([USER, BEGUN], "The answer"), ([BEGUN, USER], ""), ([USER, {**BEGUN, "content": ""}], "")]
)
def test_an_echo_begins_a_chat(client: Client, turns: list[dict[str, str]], begins: str, stream: bool) -> None:
    answer = client.post(CHAT, {"messages": turns, "echo": True, "n": 2, "stream": stream})
    if stream:
        said = ["", ""]
        for event in answer.events:
            said[event["choices"][0]["index"]] += event["choices"][0]["delta"]["content"]
    else:
        said = [choice["message"]["content"] for choice in answer.json["choices"]]
    assert said == [f"{begins}import os", f"{begins}return x"]


def test_whether_a_template_begins_an_answer(client: Client, templated: Engine) -> None:
    for fields, expected in (
        ({}, "<user>hi</user><assistant>"),
        ({"add_generation_prompt": True}, "<user>hi</user><assistant>"),
        ({"add_generation_prompt": False}, "<user>hi</user>"),
    ):
        assert client.post(CHAT, {"messages": [USER], **fields}).status == 200
        assert templated.prompt == expected
        tokens = client.post("/tokenize", {"messages": [USER], **fields}).json["tokens"]
        assert tokens == templated.submitted[-1].tokens


@pytest.mark.parametrize("begins", [None, False])
def test_a_template_may_leave_the_last_message_open(client: Client, templated: Engine, begins: bool | None) -> None:
    fields = {"messages": [USER, BEGUN], "continue_final_message": True, "add_generation_prompt": begins}
    body = client.post(CHAT, {**fields, "echo": True}).json
    assert templated.prompt == "<user>hi</user><assistant>The answer"
    assert body["choices"][0]["message"]["content"] == "The answerimport os"
    assert client.post("/tokenize", fields).json["tokens"] == templated.submitted[-1].tokens


def test_a_message_is_not_continued_and_answered(client: Client) -> None:
    fields = {"messages": [USER, BEGUN], "continue_final_message": True, "add_generation_prompt": True}
    answer = client.post(CHAT, fields)
    assert (answer.status, answer.error["param"]) == (400, "add_generation_prompt")
    assert "expected false with continue_final_message" in answer.error["message"]


def test_arguments_of_the_template(client: Client, templated: Engine) -> None:
    fields = {"messages": [USER], "chat_template_kwargs": {"tone": "Calm: ", "unknown": [1, {"a": None}]}}
    assert client.post(CHAT, fields).status == 200
    assert templated.prompt == "Calm: <user>hi</user><assistant>"
    assert client.post("/tokenize", fields).json["tokens"] == templated.submitted[-1].tokens


def test_special_tokens_around_a_chat(client: Client, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = engine.tokenizer.encode
    monkeypatch.setattr(
        engine.tokenizer, "encode", lambda text, add_special_tokens: [1] * add_special_tokens + encode(text)
    )
    for special in (True, False, None):
        fields = {"messages": [USER], "add_special_tokens": special}
        assert client.post(CHAT, fields).status == 200
        assert (engine.submitted[-1].tokens[0] == 1) is (special is True)
        assert client.post("/tokenize", fields).json["tokens"] == engine.submitted[-1].tokens


# -- docs/coming-from-vllm.md: its tables say what the server does


PAGE = "coming-from-vllm.md"
PARAMETERS = [codes(row[0])[0] for row in table(PAGE, "Parameters of requests")]
ROUTES = [(route, row[1]) for row in table(PAGE, "Routes") for route in codes(row[0])]
METRICS = [name for row in table(PAGE, "Metrics") for name in codes(row[1]) if "…" not in name]


@pytest.mark.parametrize("fields", PARAMETERS)
def test_parameters_on_the_page_are_taken(client: Client, fields: str) -> None:
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 4, **json.loads(f"{{{fields}}}")}
    assert client.post("/v1/completions", body).status == 200


@pytest.mark.parametrize(("route", "says"), ROUTES)
def test_routes_on_the_page_are_there_or_not(client: Client, route: str, says: str) -> None:
    method, path = route.replace("{name}", "tiny").split()
    status = (client.get(path) if method == "GET" else client.post(path, {})).status
    assert says.startswith("served") == (status != 404) and (status == 404) == (says == "404")


def test_metrics_on_the_page_are_served() -> None:
    text = ServerMetrics("tiny").render()[0].decode()
    assert METRICS and [name for name in METRICS if f"# TYPE {name} " not in text] == []
