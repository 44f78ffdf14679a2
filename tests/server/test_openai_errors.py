"""Requests that cannot be served raise the official client's exceptions, which name the field, in every mode."""

from typing import Any

import pytest
from openai import APIError, APIStatusError, BadRequestError, InternalServerError
from openai_cases import HELLO, MODEL
from openai_fleet import Fleet

#: Fields of a completion that are refused, some by the target, and the field that the error names. test_refusals has
#: all others.
COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": {"100000": 1}}, "logit_bias"),
    ({"stop_token_ids": [100_000]}, "stop_token_ids"),
    ({"allowed_token_ids": [100_000]}, "allowed_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"prompt": [600]}, "prompt"),
    ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
]
#: The same of chats.
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"grammar": "start: other"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"guided_json": {"if": {}}}, "guided_json"),
    ({"documents": ["x"]}, "documents"),
    ({"include_reasoning": "no"}, "include_reasoning"),
]
REFUSED = [(False, *each) for each in COMPLETIONS] + [(True, *each) for each in CHATS]


def arguments(chat: bool, changes: dict[str, Any]) -> dict[str, Any]:
    """The client takes only some fields; others go around it."""
    known: dict[str, Any] = {"messages": [HELLO]} if chat else {"prompt": "def f("}
    return {"model": MODEL, "max_tokens": 8, **known, "extra_body": changes}


@pytest.mark.parametrize(("chat", "changes", "field"), REFUSED, ids=lambda value: str(value)[:50])
def test_a_bad_field_is_named(fleet: Fleet, mode: str, chat: bool, changes: dict[str, Any], field: str) -> None:
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
