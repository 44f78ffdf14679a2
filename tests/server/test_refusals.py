"""Requests that cannot be served are 400, or have their own status, with OpenAI's body: one line names the field."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from http_double import CHAT, COMPLETIONS, IDENTITY, USER, Client, Engine, Health

from pilotfish.server.bodies.ignored import HEADER
from pilotfish.server.bodies.requests import HINTS, INSTEAD, UNSUPPORTED

#: A field, a value that is not allowed, and words of the answer.
BAD = [
    ("temperature", -1, "temperature: -1.0 is not allowed; expected a number 0 to 100"),
    ("temperature", "hot", "temperature: 'hot' is not allowed; expected a number"),
    ("top_p", 0, "top_p"),
    ("seed", -2, "seed: -2 is not allowed"),
    ("seed", 1 << 64, "seed"),
    ("seed", str(1 << 64), "seed: 18446744073709551616 is not allowed"),
    ("seed", "-1", "seed: '-1' is not allowed; expected an integer 0 to 18446744073709551615, or its digits as text"),
    ("seed", "9" * 5000, "or its digits as text"),
    ("seed", True, "or its digits as text"),
    ("n", 17, "expected an integer 1 to 16"),
    ("n", 10**30, "n: 1"),
    ("n", 1.5, "n: 1.5 is not allowed; expected an integer"),
    ("max_tokens", 0, "an integer of at least 1"),
    ("min_tokens", 17, "min_tokens"),
    ("stop", "", "strings of 1 to"),
    ("stop", ["a"] * 10_000, "stop: 10000 entries are not allowed; expected at most 16"),
    ("stop", 3, "stop: 3 is not allowed; expected text or a list"),
    ("stop_token_ids", [-1], "stop_token_ids"),
    ("stop_token_ids", [5] * 1025, "stop_token_ids: 1025 entries are not allowed; expected at most 1024"),
    ("include_stop_str_in_output", 1, "include_stop_str_in_output: 1 is not allowed; expected true or false"),
    ("truncate_prompt_tokens", 0, "truncate_prompt_tokens: 0 is not allowed; expected -1, or an integer of at least 1"),
    ("truncation_side", "middle", "truncation_side: 'middle' is not allowed; expected left or right"),
    ("request_id", "", "request_id: '' is not allowed; expected 1 to 128 printable ASCII characters"),
    ("best_of", 2, "best_of: 2 is not allowed"),
    ("bad_words", ["a"] * 65, "bad_words"),
    ("allowed_token_ids", [0.5], "allowed_token_ids[0]: 0.5"),
    ("logit_bias", {"x": 1}, "logit_bias: 'x' is not allowed; expected token ids"),
    ("logit_bias", {"5": 101}, "logit_bias"),
    ("prompt_logprobs", 21, "prompt_logprobs"),
    ("timeout", 0, "timeout"),
    ("stream_options", {"include_usage": True}, "without stream"),
    ("speculation", {"mode": "turbo"}, "expected off, sync or async"),
    ("speculation", {"max_nodes": -1}, "speculation.max_nodes: -1 is not allowed; expected an integer 0 to 8"),
    ("speculation", {"depth": 1}, "speculation.depth: there is no such parameter"),
    ("max_output_tokens", 5, "max_output_tokens: there is no such parameter"),
    ("max_new_tokens", 5, "max_new_tokens: 5 is not supported; leave it out: max_tokens limits an output"),
    ("temprature", 0, "temprature: there is no such parameter; expected temperature"),
    ("Top-P", 0.5, "Top-P: there is no such parameter; expected top_p"),
]
#: What a server that is strict refuses too.
STRICT = [
    ("stream_options", {"more": True}, "stream_options.more: there is no such parameter"),
    ("speculation", {"mode": "async"}, "speculation.mode: 'async' is not allowed; expected off or sync"),
    ("speculation", {"max_nodes": 9}, "speculation.max_nodes: 9 is not allowed; expected an integer 0 to 8"),
    ("nobody_knows", 1, "nobody_knows: there is no such parameter"),
    ("service_tier", "flex", "service_tier: 'flex' is not supported; leave it out"),
]
BAD_COMPLETIONS = [
    ("prompt", None, "prompt: it is missing"),
    ("prompt", "", "prompt: '' is not allowed; expected at least one token"),
    ("prompt", [], "prompt: 0 prompts are not allowed; expected 1 to 64"),
    ("prompt", ["a"] * 65, "expected 1 to 64"),
    ("prompt", ["a", 1], "expected a text, a list of tokens, or a list of either"),
    ("prompt", [512], "prompt: 512 is not allowed; expected token ids 0 to"),
    ("prompt", [[-1]], "prompt: -1 is not allowed"),
    ("prompt", [True, 1], "prompt[0]: True is not allowed"),
    ("prompt", [[1, True]], "prompt[0][1]: True is not allowed"),
    ("continue_final_message", True, "continue_final_message: there is no such parameter"),
    ("logprobs", 21, "logprobs"),
]
BAD_CHATS = [
    ("messages", None, "messages: it is missing"),
    ("messages", [], "at least one message"),
    ("messages", [{"role": "tool", "content": "x"}], "messages[0].tool_call_id: it is missing"),
    ("messages", [{"role": "user"}], "messages[0].content: it is missing"),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "'image_url' is not allowed"),
    ("messages", [{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type: it is missing"),
    ("messages", [{"role": "function", "content": "x"}], "expected system, developer, user, assistant or tool"),
    ("messages", [{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content: it is missing"),
    ("messages", [{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].id: it is missing"),
    ("messages", [{"role": "user", "content": "refuse"}], "messages: the chat template refuses them: no"),
    ("top_logprobs", 3, "logprobs: None is not allowed; expected true"),
    ("max_completion_tokens", 300, "max_completion_tokens: 300 is not allowed; expected at most"),
    ("max_completion_tokens", 300, "tokens, the context 256"),
    ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs: 'messages' is not allowed"),
    ("chat_template_kwargs", {"add_generation_prompt": False}, "chat_template_kwargs: 'add_generation_prompt'"),
    ("chat_template_kwargs", ["x"], "chat_template_kwargs: ['x'] is not allowed; expected an object"),
]


def asked(path: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": "def", **fields} if path == COMPLETIONS else {"messages": [USER], **fields}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("field", "value", "words"), BAD)
def test_a_bad_value_is_named(client: Client, engine: Engine, path: str, field: str, value: Any, words: str) -> None:
    if (path, field) == (CHAT, "min_tokens"):  # more than the context has
        value, words = 10_000, "min_tokens: 10000 is not allowed; expected at most"
    answer = client.post(path, asked(path, **{field: value}))
    assert answer.status == 400 and answer.error["type"] == "invalid_request_error"
    assert words in answer.error["message"] and (answer.error["param"] or "").startswith(field)
    assert len(answer.error["message"]) < 500 and not engine.submitted


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("field", "value", "words"), STRICT)
def test_what_a_strict_server_names(
    serve: Callable[..., Client], engine: Engine, path: str, field: str, value: Any, words: str
) -> None:
    answer = serve(strict=True).post(path, asked(path, stream=True, **{field: value}))
    assert answer.status == 400 and words in answer.error["message"] and not engine.submitted


@pytest.mark.parametrize(
    ("path", "field", "value", "words"),
    [(COMPLETIONS, *each) for each in BAD_COMPLETIONS] + [(CHAT, *each) for each in BAD_CHATS],
)
def test_a_bad_value_of_one_api_is_named(client: Client, path: str, field: str, value: Any, words: str) -> None:
    answer = client.post(path, asked(path, **{field: value}))
    assert answer.status == 400 and words in answer.error["message"]


def test_messages_that_come_to_nothing(client: Client, engine: Engine) -> None:
    engine.tokenizer.chat_template = "{{ messages[0].content }}"
    answer = client.post(CHAT, {"messages": [{"role": "user", "content": ""}]})
    assert (answer.status, answer.error["param"]) == (400, "messages") and not engine.submitted


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_what_is_not_supported_is_named(client: Client, field: str) -> None:
    answer = client.post(CHAT, asked(CHAT, **{field: "something"}))
    assert (answer.status, answer.error["param"]) == (400, field)
    refused = f"{field}: 'something' is not supported; leave it out"
    assert answer.error["message"] == (f"{refused}: {INSTEAD[field]}" if field in INSTEAD else refused)


@pytest.mark.parametrize(("field", "values"), [*UNSUPPORTED.items(), *HINTS.items()])
def test_what_changes_nothing_is_accepted(serve: Callable[..., Client], field: str, values: Sequence[Any]) -> None:
    for value in values:
        answer = serve(strict=True).post(CHAT, asked(CHAT, **{field: value}))
        assert answer.status == 200 and HEADER not in answer.headers


@pytest.mark.parametrize(
    ("asked_for", "nodes", "told"),
    [
        ({"max_nodes": 9}, 8, {"max_nodes": 8}),
        ({"max_nodes": 9, "mode": "async"}, 8, {"max_nodes": 8, "mode": "sync"}),
        ({"mode": "async"}, None, {"mode": "sync"}),
        ({"mode": "off", "max_nodes": 1 << 40}, 0, {"max_nodes": 8}),
        ({"max_nodes": 8, "mode": "sync"}, 8, None),
    ],
)
def test_more_speculation_than_there_is_becomes_what_there_is(
    client: Client, engine: Engine, asked_for: dict[str, Any], nodes: int | None, told: dict[str, Any] | None
) -> None:
    """In the answers of all APIs, streamed or not."""
    message = {"model": "tiny", "max_tokens": 9, "messages": [USER]}
    for path, body in ((COMPLETIONS, {"prompt": "def"}), (CHAT, {"messages": [USER]}), ("/v1/messages", message)):
        answer = client.post(path, {**body, "speculation": asked_for})
        assert answer.status == 200 and engine.submitted[-1].max_nodes == nodes
        assert answer.json.get("pilotfish", {}).get("speculation") == told
        assert answer.headers.get(HEADER, "") == ", ".join(
            f"speculation.{name}" for name in sorted(told or {}, reverse=True)
        )
        streamed = client.post(path, {**body, "stream": True, "speculation": asked_for}).body.decode()
        assert ('"pilotfish":{"speculation":' in streamed) == (told is not None)


#: vLLM's own values of all its parameters, as a client that spells them out sends them.
NULLS = (
    *("logit_bias", "seed", "stream_options", "truncate_prompt_tokens", "truncation_side", "prompt_logprobs"),
    *("logprob_token_ids", "allowed_token_ids", "response_format", "structured_outputs", "session_id", "cache_salt"),
    *("return_tokens_as_token_ids", "return_token_ids", "kv_transfer_params", "ec_transfer_params", "vllm_xargs"),
    *("repetition_detection", "thinking_token_budget", "stream_interval", "watermarking", "user"),
)
VLLMS: dict[str, Any] = {
    **dict.fromkeys(NULLS),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p"), 0.0),
    **dict.fromkeys(("temperature", "top_p", "repetition_penalty", "length_penalty"), 1.0),
    **dict.fromkeys(("n", "best_of"), 1),
    "stop": [],
    "stop_token_ids": [],
    "bad_words": [],
    **dict.fromkeys(("min_tokens", "priority", "routed_experts_prompt_start"), 0),
    **dict.fromkeys(("stream", "use_beam_search", "include_stop_str_in_output", "ignore_eos", "echo"), False),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "return_mm_kwargs"), True),
    "top_k": -1,
    "return_token_offsets": False,
    "request_id": "0123456789abcdef",
}
OF_COMPLETIONS: dict[str, Any] = {"suffix": None, "logprobs": None, "prompt_embeds": None, "add_special_tokens": True}
NULLS_OF_CHATS = (
    *("max_completion_tokens", "tools", "reasoning_effort", "documents", "chat_template", "chat_template_kwargs"),
    *("media_io_kwargs", "mm_processor_kwargs", "return_prompt_text"),
)
OF_CHATS: dict[str, Any] = {
    **dict.fromkeys(NULLS_OF_CHATS),
    **dict.fromkeys(("logprobs", "continue_final_message", "add_special_tokens"), False),
    **dict.fromkeys(("include_reasoning", "parallel_tool_calls", "add_generation_prompt"), True),
    "top_logprobs": 0,
    "tool_choice": "none",
}


@pytest.mark.parametrize(("path", "own"), [(COMPLETIONS, OF_COMPLETIONS), (CHAT, OF_CHATS)])
def test_vllms_own_values_change_nothing(client: Client, engine: Engine, path: str, own: dict[str, Any]) -> None:
    plain, spelt = client.post(path, asked(path)), client.post(path, asked(path, **VLLMS, **own))
    assert plain.status == spelt.status == 200
    assert spelt.json["id"].endswith("cmpl-0123456789abcdef")
    assert plain.json["choices"] == spelt.json["choices"]
    assert engine.submitted[0].tokens == engine.submitted[1].tokens
    assert engine.submitted[0].params == engine.submitted[1].params


def test_a_limit_given_twice_must_be_one(client: Client, engine: Engine) -> None:
    answer = client.post(CHAT, asked(CHAT, max_tokens=4, max_completion_tokens=5))
    assert (answer.status, answer.error["param"]) == (400, "max_tokens")
    assert client.post(CHAT, asked(CHAT, max_tokens=5, max_completion_tokens=5)).status == 200
    assert engine.submitted[-1].params.max_tokens == 5


@pytest.mark.parametrize(
    ("tokens", "limits", "field"),
    [
        (200, {"max_tokens": 57}, "max_tokens"),
        (200, {"max_tokens": 58, "min_tokens": 58}, "max_tokens"),
        (200, {"max_tokens": 5, "min_tokens": 58}, "min_tokens"),
        (256, {"max_tokens": 1}, "prompt"),
        (300, {}, "prompt"),
    ],
)
def test_more_than_the_context(client: Client, tokens: int, limits: dict[str, int], field: str) -> None:
    answer = client.post(COMPLETIONS, {"prompt": [5] * tokens, **limits})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "context_length_exceeded", field)
    assert f"{tokens} tokens" in answer.error["message"] and "context" in answer.error["message"]
    assert "256" in answer.error["message"] and answer.error["message"].startswith(f"{field}: ")


def test_more_than_the_kv_pool(client: Client, engine: Engine) -> None:
    identity = msgspec.structs.replace(IDENTITY, kv_slots=100, longest=100)
    engine.health = Health(identity=identity)
    answer = client.post(COMPLETIONS, {"prompt": [5] * 60, "max_tokens": 41})
    assert (answer.status, answer.error["param"]) == (400, "max_tokens")
    assert "expected at most 40: the prompt has 60 tokens, the target's KV pool 100" in answer.error["message"]
    assert client.post(COMPLETIONS, {"prompt": [5] * 100}).error["param"] == "prompt"
    assert client.post(COMPLETIONS, {"prompt": [5] * 60, "max_tokens": 40}).status == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
def test_an_unknown_model(client: Client, path: str) -> None:
    answer = client.post(path, asked(path if path == CHAT else COMPLETIONS, model="other"))
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")


DEEP, MIB = 100_000, 1 << 20


@pytest.mark.parametrize(
    ("raw", "about"),
    [
        *((raw, "body") for raw in (b"", b"{", b"null", b"[]", b'"text"', b"\xff\xfe", b'{"prompt": "\xff"}')),
        *(
            (raw, "body")
            for raw in ('{"prompt": "x"}'.encode("utf-16"), b'{"prompt": "x"}{}', b'{"prompt": "\\ud800"}')
        ),
        *((raw, "body") for raw in (b'{"\\udc00": 1}', b'{"prompt": "x", "temperature": NaN}')),
        (b'{"prompt": "x", "logit_bias": {"1": -Infinity}}', "body"),
        (b'{"prompt": "x", "temperature": 1e999}', ""),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", ""),
        (b'{"prompt": [99999999999999999999]}', "prompt"),
        *((raw, "body") for raw in (b"[" * DEEP, b"[" * DEEP + b"]" * DEEP, b'{"user":' * DEEP + b"1" + b"}" * DEEP)),
        (b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}", "body"),
        (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", "prompt"),
        *((b'{"%s": ' % name + b"[" * 900 + b"]" * 900 + b"}", "") for name in (b"nobody_knows", b"tools")),
        (b'{"prompt": [' + b"1," * 100_000 + b"1]}", "prompt"),
        (b'{"prompt": "x", "stop": "' + b"s" * MIB + b'"}', "stop"),
        (b'{"prompt": "x", "' + b"f" * MIB + b'": 1}', "there is no such parameter"),
        (json.dumps({f"f{i}": i for i in range(100_000)}).encode(), "there is no such parameter"),
        (b'{"prompt": "x", "a\\r\\nb\\u0000": 1}', "there is no such parameter"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_no_request(client: Client, raw: bytes, about: str) -> None:
    answer = client.post(COMPLETIONS, raw=raw)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
    assert about in answer.error["message"] and answer.error["message"].isprintable()
    assert len(answer.error["message"]) < 600


def test_a_body_over_the_limit(serve: Callable[..., Client]) -> None:
    client = serve(max_body_bytes=100_000)
    assert client.post(COMPLETIONS, raw=b"x" * 200_000).status == 413
    stated = client.post(COMPLETIONS, raw=b"{}", content_length="100001")
    assert (stated.status, stated.error["code"]) == (413, "request_too_large")
    assert stated.error["message"] == "body: it is too large; expected at most 100000 bytes"
    assert client.post(COMPLETIONS, raw=b"{}", content_length="9" * 40).status == 413


def test_content_types(client: Client) -> None:
    assert client.post(COMPLETIONS, {"prompt": "x"}, content_type="").status == 200
    assert client.post(COMPLETIONS, {"prompt": "x"}, content_type="application/json; charset=utf-8").status == 200
    for content_type in ("text/plain", "multipart/form-data", "a" * 5000, "application/jsonx"):
        answer = client.post(COMPLETIONS, {"prompt": "x"}, content_type=content_type)
        assert answer.status == 415 and content_type[:20] in answer.error["message"]
        assert len(answer.error["message"]) < 600


def test_routes_that_are_not_there(client: Client) -> None:
    for path in ("/v1/images/generations", "/v1/embeddings", "/nothing", "/v1/completions/"):
        answer = client.post(path, {"model": "tiny", "input": "x"})
        assert (answer.status, answer.error["type"]) == (404, "invalid_request_error")
        assert answer.error["code"] == "unknown_url"
        assert answer.error["message"] == f"path: POST '{path}' is not served"
    wrong = client.get(COMPLETIONS)
    assert (wrong.status, wrong.headers["allow"], wrong.error["code"]) == (405, "POST", "method_not_supported")
    assert wrong.error["message"] == "path: GET '/v1/completions' is not allowed; expected POST"


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("/v1/completions", {"prompt": "x" * 200_000}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "x" * 200_000]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 200_000}]}, "messages"),
        ("/tokenize", {"prompt": "x" * 200_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 200_000}]}, "messages"),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    client: Client, engine: Engine, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], field: str
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(type(engine.tokenizer), "encode", never)
    answer = client.post(path, fields)
    assert answer.status == 400 and answer.error["param"] == field
    assert answer.error["code"] == "context_length_exceeded" and "200000 characters" in answer.error["message"]


def test_names_of_a_client_are_shortened(client: Client) -> None:
    name = "k" * 50_000
    for body in ({name: 1}, {"messages": [{**USER, name: 1}]}, {"structured_outputs": {name: 1}}):
        error = client.post(CHAT, {"messages": [USER], **body}).error
        assert error["message"].endswith("there is no such parameter")
        assert max(len(error["message"]), len(error["param"])) < 450
