"""Calls in every format of models, enforced by its grammar and read by its parser, through the official client."""

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from inline_server import inline_server
from openai import OpenAI
from pydantic import BaseModel, Field
from sizes import sized

from pilotfish.engine.pairs import resolve_pair
from pilotfish.grammar.parsers.formats import TOOL_FORMATS

#: Tells the model of the tools.
TEMPLATE = (
    "{% for tool in tools or [] %}# {{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}{{ m.content }}\n{% endfor %}"
)


class Move(BaseModel):
    direction: Literal["up", "down"]
    steps: int = Field(ge=0, le=9)
    fast: bool


class Say(BaseModel):
    words: list[Literal["yes", "no", "☃"]] = Field(max_length=2)


MODELS: dict[str, type[BaseModel]] = {"move": Move, "say": Say}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": model.model_json_schema()}}
    for name, model in MODELS.items()
]
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "move", "schema": Move.model_json_schema()}}


@pytest.fixture(scope="module", params=sized(("pythonic",), TOOL_FORMATS))
def client(request: pytest.FixtureRequest) -> Iterator[OpenAI]:
    pair = resolve_pair("pycode")
    options = {"tool_call_parser": request.param, "chat_template": TEMPLATE, "served_model_name": ("pycode",)}
    with (
        inline_server(pair.target, draft=pair.draft, mode="sync", kv_slots=16384, **options) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as made,
    ):
        yield made


def asked(seed: int, **fields: Any) -> dict[str, Any]:
    sampled = {"temperature": 0} if seed == 0 else {"temperature": 1, "seed": seed}
    message = {"role": "user", "content": "def mean(values):"}
    return {"model": "pycode", "messages": [message], "tools": TOOLS, "max_tokens": 256, **sampled, **fields}


def calls(message: Any) -> list[tuple[str, BaseModel]]:
    """Each is of its tool's schema."""
    functions = [call.function for call in message.tool_calls or []]
    return [(each.name, MODELS[each.name].model_validate_json(each.arguments)) for each in functions]


def streamed(client: OpenAI, fields: dict[str, Any]) -> Any:
    with client.chat.completions.stream(**fields) as stream:
        return stream.until_done().get_final_completion().choices[0]


@pytest.mark.parametrize("seed", sized(range(2), range(4)))
def test_required_calls(client: OpenAI, seed: int) -> None:
    fields = asked(seed, tool_choice="required", parallel_tool_calls=False)
    choice = client.chat.completions.create(**fields).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert len(calls(choice.message)) == 1 and calls(streamed(client, fields).message) == calls(choice.message)


@pytest.mark.parametrize("seed", sized(range(2), range(4)))
def test_an_answer_of_a_format_or_calls(client: OpenAI, seed: int) -> None:
    choice = client.chat.completions.create(**asked(seed, response_format=FORMAT, parallel_tool_calls=False)).choices[0]
    if choice.finish_reason == "tool_calls":
        assert len(calls(choice.message)) == 1 and choice.message.content is None
    else:
        assert choice.finish_reason == "stop" and Move.model_validate_json(choice.message.content or "")
