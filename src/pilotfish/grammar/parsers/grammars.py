"""Grammars of tool calls in Lark, as llguidance reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pilotfish.errors import ParameterError
from pilotfish.grammar.schema import COMPACT, OPTIONS

ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class Tool:
    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None  # the JSON schema of its arguments; None: any object
    strict: bool = False


class CallGrammar(Protocol):
    def __call__(
        self, tools: Sequence[Tool], *, named: str | None, parallel: bool, added: Mapping[str, int]
    ) -> str: ...


def hermes_grammar(tools: Sequence[Tool], *, named: str | None, parallel: bool, added: Mapping[str, int]) -> str:
    start, end = (mark(own, added) for own in ("<tool_call>", "</tool_call>"))
    repeated = ' ("\\n" call)*' if parallel and named is None else ""
    return rules(
        f'start: "\\n"{{0,2}} call{repeated}',
        f'call: {start} "\\n" object "\\n" {end}',
        *_objects("arguments", chosen(tools, named)),
    )


def llama3_json_grammar(tools: Sequence[Tool], *, named: str | None, parallel: bool, added: Mapping[str, int]) -> str:
    tag = f"{mark('<|python_tag|>', added)}? " if "<|python_tag|>" in added else ""
    repeated = ' ("; " object)*' if parallel and named is None else ""
    return rules(f'start: "\\n"{{0,2}} {tag}object{repeated}', *_objects("parameters", chosen(tools, named)))


def mistral_grammar(tools: Sequence[Tool], *, named: str | None, parallel: bool, added: Mapping[str, int]) -> str:
    """One mark before a list, for tokenizers without [ARGS]; or a mark, a name and arguments for each call."""
    calls, several = mark("[TOOL_CALLS]", added), parallel and named is None
    if "[ARGS]" not in added:
        repeated = ' (", " object)*' if several else ""
        objects = _objects("arguments", chosen(tools, named))
        return rules(f'start: {calls} " "? "[" object{repeated} "]"', *objects)
    own_id = f"({mark('[CALL_ID]', added)} /[a-zA-Z0-9]{{9}}/)? " if "[CALL_ID]" in added else ""
    picked = chosen(tools, named)
    calls_of = [f"{text(tool.name)} {own_id}{mark('[ARGS]', added)} arguments{i}" for i, tool in enumerate(picked)]
    return rules(
        f"start: call{'+' if several else ''}",
        f"call: {calls} ({' | '.join(calls_of)})",
        *(f"arguments{i}: {json_of(parameters(tool))}" for i, tool in enumerate(picked)),
    )


def _objects(key: str, tools: Sequence[Tool]) -> list[str]:
    calls = []
    for i, tool in enumerate(tools):
        opening = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": '
        calls.append(f'{text(opening)} arguments{i} "}}"')
    return [
        f"object: {' | '.join(calls)}",
        *(f"arguments{i}: {json_of(parameters(tool))}" for i, tool in enumerate(tools)),
    ]


def chosen(tools: Sequence[Tool], named: str | None) -> list[Tool]:
    picked = [tool for tool in tools if named in (None, tool.name)]
    if not picked:
        raise ParameterError("tool_choice", named, f"one of the tools: {', '.join(tool.name for tool in tools)}")
    return picked


def parameters(tool: Tool) -> Mapping[str, Any]:
    return ANY_OBJECT | dict(tool.parameters or {})


def mark(own: str, added: Mapping[str, int]) -> str:
    return f"<[{added[own]}]>" if own in added else text(own)


def text(literal: str) -> str:
    return json.dumps(literal, ensure_ascii=False)


def json_of(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, OPTIONS: COMPACT}, ensure_ascii=False)}"


def rules(*lines: str) -> str:
    return "\n".join(lines) + "\n"


# -- calls beside something else: the rule `start` of a grammar derives calls


def calls_or_json(calls: str, schema: Mapping[str, Any]) -> str:
    return f"start: some_calls | answer\n{_renamed(calls)}answer: {json_of(schema)}\n"


def text_and_calls(calls: str, own: str) -> str:
    """Either or both, the text first. Calls begin with `own`, a token of the model, which ends a text."""
    return f"start: TEXT? some_calls?\nTEXT: /(?s:.+)/ & ~/(?s:.*){re.escape(own)}(?s:.*)/\n{_renamed(calls)}"


def _renamed(calls: str) -> str:
    return calls.replace("start:", "some_calls:", 1)
