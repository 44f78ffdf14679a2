"""Grammars of tool calls in Lark, as llguidance reads it."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pilotfish.errors import ParameterError
from pilotfish.grammar.schema import COMPACT, OPTIONS

ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class Tool:
    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None  # the JSON schema of its arguments; None: any object
    strict: bool = False


#: A grammar of calls of these tools, of several or of one, by the tokenizer's added tokens.
CallGrammar = Callable[[Sequence[Tool], bool, Mapping[str, int]], str]


def hermes_grammar(tools: Sequence[Tool], several: bool, added: Mapping[str, int]) -> str:
    start, end = (mark(own, added) for own in ("<tool_call>", "</tool_call>"))
    calls = listed("call", several, by="\n")
    return rules(
        f'start: "\\n"{{0,2}} {calls}',
        f'call: {start} "\\n" object "\\n" {end}',
        *_objects("arguments", tools),
    )


def llama3_json_grammar(tools: Sequence[Tool], several: bool, added: Mapping[str, int]) -> str:
    tag = f"{mark('<|python_tag|>', added)}? " if "<|python_tag|>" in added else ""
    objects = listed("object", several, by="; ")
    return rules(f'start: "\\n"{{0,2}} {tag}{objects}', *_objects("parameters", tools))


def mistral_grammar(tools: Sequence[Tool], several: bool, added: Mapping[str, int]) -> str:
    """One mark before a list, for tokenizers without [ARGS]; or a mark, a name and arguments for each call."""
    calls = mark("[TOOL_CALLS]", added)
    if "[ARGS]" not in added:
        objects = listed("object", several, by=", ")
        return rules(f'start: {calls} " "? "[" {objects} "]"', *_objects("arguments", tools))
    own_id = f"({mark('[CALL_ID]', added)} /[a-zA-Z0-9]{{9}}/)? " if "[CALL_ID]" in added else ""
    calls_of = [f"{text(tool.name)} {own_id}{mark('[ARGS]', added)} arguments{i}" for i, tool in enumerate(tools)]
    return rules(f"start: call{'+' if several else ''}", f"call: {calls} ({' | '.join(calls_of)})", *_arguments(tools))


def _objects(key: str, tools: Sequence[Tool]) -> list[str]:
    openings = [f'{{"name": {text(tool.name)}, "{key}": ' for tool in tools]
    calls = [f'{text(opening)} arguments{i} "}}"' for i, opening in enumerate(openings)]
    return [f"object: {' | '.join(calls)}", *_arguments(tools)]


def _arguments(tools: Sequence[Tool]) -> list[str]:
    return [f"arguments{i}: {json_of(parameters(tool))}" for i, tool in enumerate(tools)]


def listed(rule: str, several: bool, *, by: str) -> str:
    return f"{rule} ({text(by)} {rule})*" if several else rule


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
