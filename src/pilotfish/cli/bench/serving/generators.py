"""Sessions of each kind of workload, made of templates: what is asked, turn by turn."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import Struct

from pilotfish.cli.bench.serving.requests import Message
from pilotfish.cli.bench.serving.texts import Kind, TextMaker


class WorkloadShape(Struct, frozen=True):
    """Mean lengths of a workload, in tokens."""

    prompt: int  # the first one; of agents, what all of them share
    answer: int  # max_tokens
    turns: int = 1
    message: int = 0  # each turn after the first: a question, or what a tool has returned
    spread: float = 0.0  # lengths vary by up to this share


class GeneratedTask(Struct, frozen=True):
    """What a turn adds: its messages, and other fields of the request's body."""

    messages: Sequence[Message]
    fields: Mapping[str, Any] = {}


#: Makes the turns of a session, out of a text maker of its own and one that all sessions of the workload share.
SessionGenerator = Callable[[TextMaker, WorkloadShape, TextMaker], list[GeneratedTask]]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def asking(kind: Kind, words: str, text: TextMaker, shape: WorkloadShape, _: TextMaker) -> list[GeneratedTask]:
    """One turn: a text of some kind in the place that `words` leave for it, and maybe a question in another."""
    taken = text.take(text.length(shape.prompt, shape.spread), kind)
    return [GeneratedTask([_user(words.format(text=taken, question=text.one("questions")))])]


def sessions(text: TextMaker, shape: WorkloadShape, _: TextMaker) -> list[GeneratedTask]:
    lengths = [shape.prompt, *[shape.message] * (shape.turns - 1)]
    return [GeneratedTask([_user(text.take(text.length(mean, shape.spread), "questions"))]) for mean in lengths]


def structured(text: TextMaker, shape: WorkloadShape, _: TextMaker) -> list[GeneratedTask]:
    name = text.choice(list(SCHEMAS))
    report = text.take(text.length(shape.prompt, shape.spread))
    asked = f"Write down the {name} of this report as JSON.\n\n{report}"
    return [GeneratedTask([_user(asked)], _reply(name, SCHEMAS[name]))]


def agents(text: TextMaker, shape: WorkloadShape, shared: TextMaker) -> list[GeneratedTask]:
    """A task in steps. All tasks share a system prompt with the tools' schemas; replies are an action in JSON, and what
    the tool has returned is the user's next turn."""
    tools = "\n".join(json.dumps({"name": name, "parameters": schema}) for name, schema in ARGUMENTS.items())
    rules, fields = shared.take(shape.prompt), _reply("action", ACTION)
    system = {"role": "system", "content": f"You are an agent. Reply with one action.\n{tools}\n{rules}"}
    results = [text.take(text.length(shape.message, shape.spread)) for _ in range(shape.turns - 1)]
    first = GeneratedTask([system, _user(f"Task: {text.one('tasks')}")], fields)
    return [first, *(GeneratedTask([_user(result)], fields) for result in results)]


def _reply(name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}}


def _object(**properties: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


_TEXT, _NUMBER = {"type": "string", "maxLength": 60}, {"type": "integer", "minimum": 0, "maximum": 9999}
_TEXTS = {"type": "array", "items": _TEXT, "maxItems": 4}
SCHEMAS = {
    "event": _object(name=_TEXT, place=_TEXT, people=_TEXTS),
    "order": _object(customer=_TEXT, item=_TEXT, count=_NUMBER, urgent={"type": "boolean"}),
    "people": _object(names=_TEXTS, roles=_TEXTS),
    "rating": _object(score={"type": "integer", "minimum": 1, "maximum": 5}, reason=_TEXT),
}
ARGUMENTS = {
    "search": _object(query=_TEXT),
    "read_file": _object(path=_TEXT, line=_NUMBER),
    "order": _object(item=_TEXT, count=_NUMBER),
    "finish": _object(answer=_TEXT),
}
ACTION = _object(thought=_TEXT, tool={"enum": list(ARGUMENTS)}, argument=_TEXT)

#: By workload, with its lengths where options say nothing else.
GENERATORS: dict[str, tuple[SessionGenerator, WorkloadShape]] = {
    "code": (partial(asking, "functions", "# Complete this module.\n{text}"), WorkloadShape(prompt=300, answer=128)),
    "chat": (partial(asking, "questions", "{text}"), WorkloadShape(prompt=80, answer=200)),
    "sessions": (sessions, WorkloadShape(prompt=80, answer=120, turns=5, message=50)),
    "agents": (agents, WorkloadShape(prompt=600, answer=60, turns=4, message=120)),
    "long": (
        partial(asking, "sentences", "{text}\n\nAnswer in one sentence. {question}"),
        WorkloadShape(prompt=8000, answer=32),
    ),
    "summary": (
        partial(asking, "sentences", "Summarize this report in a few sentences.\n\n{text}"),
        WorkloadShape(prompt=2000, answer=150),
    ),
    "json": (structured, WorkloadShape(prompt=150, answer=120)),
}
