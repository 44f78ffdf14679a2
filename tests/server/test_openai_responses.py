"""Responses through the official client: one answer to a request, whatever the mode and the way it is sent."""

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

import pytest
from openai.resources.responses import Responses
from openai_cases import MODEL
from openai_fleet import Fleet
from response_cases import RESPONSES, TURNS, Reading

#: Fields that the client knows; all others are ours, and go into `extra_body`.
THEIRS = signature(Responses.create).parameters.keys()
#: Drawn, or dependent on the time and on what was asked before, or the client's own.
DRAWN = {"id", "call_id", "created_at", "completed_at", "cached_tokens", "metrics", "parsed_arguments"}


def arguments(name: str, **changes: Any) -> dict[str, Any]:
    """Of the client's `create`."""
    asked = {"model": MODEL, "seed": 7, "input": "Say hello.", "max_output_tokens": 24, **RESPONSES[name], **changes}
    ours = {field: asked.pop(field) for field in asked.keys() - THEIRS}
    return {**asked, "extra_body": ours}


def same(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: same(item) for name, item in value.items() if name not in DRAWN and item is not None}
    return [same(item) for item in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def answers(fleet: Fleet) -> Callable[[str, str, bool], Any]:
    """Answers of a mode to a case, whole or streamed."""

    @cache
    def answer(mode: str, name: str, stream: bool) -> Any:
        client = fleet.client(mode, strict=True)
        if not stream:
            return same(client.responses.create(**arguments(name)).to_dict())
        with client.responses.create(**arguments(name), stream=True) as events:
            *_, last = events
        assert last.type in ("response.completed", "response.incomplete")
        return same(last.response.to_dict())

    return answer


@pytest.mark.parametrize("name", RESPONSES)
def test_an_answer(answers: Any, mode: str, name: str) -> None:
    expected = answers("off", name, False)
    assert answers(mode, name, True) == expected
    usage = expected["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    cut = expected["status"] == "incomplete"
    limit = RESPONSES[name].get("max_output_tokens", 24)
    assert usage["output_tokens"] == limit if cut else usage["output_tokens"] <= limit
    assert expected["output"][-1]["status"] == expected["status"]


# -- streams


@pytest.mark.parametrize("name", ["greedy", "tool-required-once", "logprobs"])
def test_the_clients_own_stream(fleet: Fleet, answers: Any, name: str) -> None:
    """It puts the response together from the events, and gives a final one only where it is complete."""
    told = answers("off", name, False)
    with fleet.client("async").responses.stream(**arguments(name)) as stream:
        events = list(stream)
    assert same(events[-1].response.to_dict()) == told
    texts = [event.snapshot for event in events if event.type == "response.output_text.delta"]
    assert not texts or texts[-1] == told["output"][0]["content"][0]["text"]


# -- formats and calls


def test_a_parsed_answer(fleet: Fleet, mode: str) -> None:
    asked = {**arguments("sampled"), "max_output_tokens": 240}
    parsed = fleet.client(mode).responses.parse(**asked, text_format=Reading)
    assert parsed.status == "completed" and isinstance(parsed.output_parsed, Reading)
    with fleet.client(mode).responses.stream(**asked, text_format=Reading) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed


def test_turns(fleet: Fleet, answers: Any) -> None:
    """A conversation by items is that of a chat by messages."""
    chat = fleet.client("off").chat.completions.create(
        model=MODEL,
        messages=[*TURNS[:3], {"role": "user", "content": "Once\nmore: ☃"}],
        max_completion_tokens=24,
        temperature=0.8,
        seed=7,
    )
    told = answers("off", "turns", False)
    assert told["output"][0]["content"][0]["text"] == chat.choices[0].message.content
    assert told["usage"]["input_tokens"] == chat.usage.prompt_tokens
    assert answers("off", "turns-with-instructions", False)["output"] == told["output"]
