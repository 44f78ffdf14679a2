"""Requests that cannot be served raise the official client's exceptions, which name the field, in every mode."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import (
    APIError,
    APIStatusError,
    AsyncOpenAI,
    AuthenticationError,
    BadRequestError,
    InternalServerError,
    NotFoundError,
    OpenAI,
    RateLimitError,
)
from openai_cases import HELLO, MODEL
from openai_fleet import MAX_BODY, SECRETS, Fleet

from pilotfish.server.bodies.ignored import HEADER

#: Fields of a completion that are refused, some by the target, and the field that the error names. test_refusals has
#: all others.
COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"best_of": 4}, "best_of"),
    ({"temperature": -0.1}, "temperature"),
    ({"logit_bias": {"100000": 1}}, "logit_bias"),
    ({"seed": 2**64}, "seed"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [100_000]}, "stop_token_ids"),
    ({"allowed_token_ids": [100_000]}, "allowed_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"prompt": [600]}, "prompt"),
    ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
    ({"speculation": {"nodes": 1}}, "speculation.nodes"),
]
#: The same of chats.
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function", "function": {"name": "f x"}}]}, "tools[0].function.name"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"grammar": "start: other"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"guided_json": {"if": {}}}, "guided_json"),
    ({"documents": ["x"]}, "documents"),
    ({"messages": [HELLO, {"role": "assistant", "content": None, "tool_calls": [{}]}]}, "messages[1].tool_calls[0].id"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ({"include_reasoning": "no"}, "include_reasoning"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens"),
]
REFUSED = [(False, *each) for each in COMPLETIONS] + [(True, *each) for each in CHATS]


def arguments(chat: bool, changes: dict[str, Any]) -> dict[str, Any]:
    """The client takes only some fields; others go around it."""
    known: dict[str, Any] = {"messages": [HELLO]} if chat else {"prompt": "def f("}
    return {"model": MODEL, "max_tokens": 8, **known, "extra_body": changes}


@pytest.mark.parametrize(("chat", "changes", "field"), REFUSED, ids=lambda value: str(value)[:50])
def test_a_field_that_cannot_be_is_named(
    fleet: Fleet, mode: str, chat: bool, changes: dict[str, Any], field: str
) -> None:
    client = fleet.client(mode)
    create = client.chat.completions.create if chat else client.completions.create
    for stream in (False, True):
        with pytest.raises(BadRequestError) as caught:
            create(**arguments(chat, changes), stream=stream)
        check(caught.value, 400, "invalid_request_error", field)


def check(error: APIStatusError, status: int, kind: str, field: str | None, code: str | None = None) -> None:
    """The body is OpenAI's, the message one line that begins with the field."""
    assert isinstance(error.body, dict) and error.body.keys() == {"message", "type", "param", "code"}
    assert error.status_code == status
    assert (error.type, error.param, error.code) == (kind, field, code)
    message = error.body["message"]
    assert message.startswith(field or "") and len(message) > len(field or "") and "\n" not in message
    assert error.request_id and error.response.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"store": True}, "store"),
        ({"speculation": {"max_nodes": 1000}}, "speculation.max_nodes"),
        ({"speculation": {"mode": "sync"}}, "speculation.mode"),
    ],
)
def test_what_changes_no_answer_is_left_out(fleet: Fleet, mode: str, fields: dict[str, Any], told: str) -> None:
    if fields == {"speculation": {"mode": mode}}:
        pytest.skip("it is the server's mode")
    create = fleet.client(mode).chat.completions.with_raw_response.create
    plain, asked = (create(**arguments(True, {"seed": 7, **more})) for more in ({}, fields))
    assert asked.headers[HEADER] == told and HEADER not in plain.headers
    assert asked.parse().choices[0].message.content == plain.parse().choices[0].message.content


def test_a_model_that_is_not_served(fleet: Fleet, mode: str) -> None:
    client = fleet.client(mode)
    asks = [
        lambda: client.models.retrieve("gpt-17"),
        lambda: client.completions.create(model="gpt-17", prompt="x"),
        lambda: client.chat.completions.create(model="gpt-17", messages=[HELLO], stream=True),
    ]
    for ask in asks:
        with pytest.raises(NotFoundError, match=r"'gpt-17' is not served; expected tiny") as caught:
            ask()
        check(caught.value, 404, "invalid_request_error", "model", "model_not_found")


def test_a_path_that_is_not_served(fleet: Fleet, mode: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        fleet.client(mode).embeddings.create(model=MODEL, input="x")
    check(caught.value, 404, "invalid_request_error", None, "unknown_url")
    assert "'/v1/embeddings' is not served" in caught.value.message


@pytest.mark.parametrize("secret", ["secret-of-nobody........", SECRETS["main"][:-1]])
def test_a_key_that_nobody_has(fleet: Fleet, mode: str, secret: str) -> None:
    with OpenAI(**fleet.options(mode, secret)) as client:
        for ask in (client.models.list, lambda: client.completions.create(**arguments(False, {}))):
            with pytest.raises(AuthenticationError) as caught:
                ask()
            check(caught.value, 401, "authentication_error", None, "invalid_api_key")
            assert secret not in str(caught.value)
            assert caught.value.response.headers["www-authenticate"] == "Bearer"
    log = fleet.servers[mode].log
    assert log and not any(one in log for one in (secret, *SECRETS.values()))


def test_a_key_with_a_salt_takes_no_other(fleet: Fleet, mode: str) -> None:
    client = fleet.client(mode, "salted")
    assert client.completions.create(**arguments(False, {"seed": 1})).choices[0].text
    with pytest.raises(BadRequestError) as caught:
        client.completions.create(**arguments(False, {"cache_salt": "another"}))
    check(caught.value, 400, "invalid_request_error", "cache_salt")


def test_a_prompt_that_is_too_long(fleet: Fleet, mode: str) -> None:
    client = fleet.client(mode)
    for length, field in ((2040, "max_tokens"), (2048, "prompt")):
        with pytest.raises(BadRequestError) as caught:
            client.completions.create(model=MODEL, prompt=[9] * length, max_tokens=9)
        assert (caught.value.param, caught.value.code) == (field, "context_length_exceeded")
        assert str(length) in caught.value.message and "2048" in caught.value.message
    long = [{"role": "user", "content": "☃ " * 3000}]
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=long)
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")


def test_a_body_that_is_too_large(fleet: Fleet, mode: str) -> None:
    client = fleet.client(mode)
    with pytest.raises(APIStatusError) as caught:
        client.completions.create(model=MODEL, prompt="x" * MAX_BODY)
    assert caught.value.status_code == 413 and str(MAX_BODY) in caught.value.message
    assert client.completions.create(**arguments(False, {"seed": 1})).choices[0].text


def test_a_key_of_one_request_at_a_time(fleet: Fleet, mode: str) -> None:
    client = fleet.client(mode, "narrow")
    endless: dict[str, Any] = {"model": MODEL, "prompt": "#", "max_tokens": 1900, "extra_body": {"ignore_eos": True}}
    with client.completions.create(**endless, stream=True) as stream:
        next(iter(stream))
        with pytest.raises(RateLimitError, match="max_concurrency: 1 requests of this key") as caught:
            client.completions.create(**arguments(False, {}))
        assert caught.value.code == "concurrency_exceeded" and caught.value.type == "rate_limit_error"
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        assert fleet.client(mode).completions.create(**arguments(False, {})).choices[0].text  # others may
    patient = client.with_options(max_retries=5)
    asked = {**arguments(False, {"ignore_eos": True}), "seed": 7}
    assert patient.completions.create(**asked).choices[0].finish_reason == "length"


def test_a_key_of_one_request_a_minute(fleet: Fleet, mode: str) -> None:
    async def ask() -> None:
        async with AsyncOpenAI(**fleet.options(mode, "rated")) as client:
            assert (await client.completions.create(**arguments(False, {}))).choices[0].text
            with pytest.raises(RateLimitError, match="requests_per_minute: this key is allowed 1") as caught:
                await client.completions.create(**arguments(False, {}), stream=True)
            assert caught.value.code == "rate_limit_exceeded"
            assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60

    asyncio.run(ask())


def test_a_request_that_takes_too_long(fleet: Fleet, mode: str) -> None:
    """A status as long as nothing was sent, then an event that the client raises."""
    create = fleet.client(mode).completions.create
    asked: dict[str, Any] = {"model": MODEL, "prompt": "#", "max_tokens": 1900}
    endless = {"timeout": 1, "ignore_eos": True}  # the KV pool holds two of eight outputs at a time
    with pytest.raises(InternalServerError, match=r"timeout: the request took more than 0\.01 s") as status:
        create(**asked, extra_body={"timeout": 0.01})
    check(status.value, 504, "timeout", "timeout", "timeout")
    with pytest.raises(APIError, match="timeout: the request took more than 1 s") as event:
        list(create(**asked, n=8, extra_body=endless, stream=True))
    assert (event.value.type, event.value.param) == ("timeout", "timeout")
