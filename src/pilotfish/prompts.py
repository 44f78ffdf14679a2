"""Prompt files: JSON Lines of {"id", "prompt"} or {"id", "turns": [text, …]}. Chat templates, applied and read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotfish.errors import InputError, ParameterError, PromptError


@dataclass(frozen=True)
class Row:
    """A request: its id, its text, and its place (`FILE:LINE`) for messages."""

    id: str | int
    texts: tuple[str, ...]
    chat: bool  # user messages, to which the model's chat template applies
    place: str


@dataclass(frozen=True)
class BadRow:
    place: str
    reason: str
    failed: bool = False  # the engine is to blame, not the row


def read_rows(path: Path) -> list[Row | BadRow]:
    """All rows of a file in order, without blank lines. InputError if there are none."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"prompts: {path} cannot be read: {error.strerror}") from error
    rows = [_row_or_reason(line, f"{path}:{i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise InputError(f"prompts: {path} has no rows; one JSON object a line is needed")
    return rows


def _row_or_reason(line: bytes, place: str) -> Row | BadRow:
    try:
        return parse_row(line, place)
    except PromptError as error:
        return BadRow(place, str(error))


def parse_row(line: bytes, place: str) -> Row:
    """Parse a line. PromptError names the field that is not allowed."""
    row = _object(line)
    if not isinstance(row.get("id"), str | int) or isinstance(row["id"], bool):
        raise PromptError(f"id: {_short(row.get('id'))} is not allowed; expected a string or an integer")
    if ("prompt" in row) == ("turns" in row):
        raise PromptError("row: exactly one of prompt and turns is needed")
    if "prompt" in row:
        return Row(row["id"], (_text("prompt", row["prompt"]),), chat=False, place=place)
    turns = row["turns"]
    if not isinstance(turns, list) or not turns:
        raise PromptError(f"turns: {_short(turns)} is not allowed; expected a list of texts")
    return Row(row["id"], tuple(_text("turns", turn) for turn in turns), chat=True, place=place)


def _object(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise PromptError(f"row: it is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise PromptError(f"row: {_short(row)} is not allowed; expected an object")
    return row


def _text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise PromptError(f"{field}: {_short(value)} is not allowed; expected text")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def prompt_of(row: Row, tokenizer: Any, *, raw: bool) -> str | Sequence[int]:
    """A row's prompt for the engine: its text, or the tokens of the chat template around it."""
    if not row.chat or raw or not tokenizer.chat_template:
        return "\n".join(row.texts)
    if not all(row.texts):
        raise PromptError("turns: a text is empty; at least one character is needed")
    return chat_prompt([{"role": "user", "content": text} for text in row.texts], tokenizer)


def chat_prompt(
    messages: Sequence[Mapping[str, str]],
    tokenizer: Any,
    template: Mapping[str, Any] | None = None,
    *,
    special: bool = False,
) -> list[int]:
    """Tokens of the chat template around messages of {role, content}, up to where the answer begins. `template` holds
    further arguments of the template; `special` adds the tokens that the tokenizer puts around a text. PromptError
    when the template refuses the messages."""
    arguments = {"add_generation_prompt": True, **(template or {})}
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
    except Exception as error:  # a template is a program: it may raise anything
        raise PromptError(f"messages: the chat template refuses them: {error}") from error
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=special)
    return tokens


def read_chat_template(given: str) -> str:
    """The template in the file `given`, or `given` itself where it cannot be a file's name: there \\n is a newline.
    ParameterError for a file that cannot be read, or what is no template."""
    template = given.replace("\\n", "\n") if any(sign in given for sign in "{}\n") else _template_in(given)
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template([], chat_template=template)  # for no conversation, it compiles only
    except TemplateSyntaxError as error:
        message = f"chat_template: it is no Jinja template: line {error.lineno}: {error.message}"
        raise ParameterError.described("chat_template", message) from error
    return template


def _template_in(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        allowed = f"a file that can be read ({why}), or the text of a template"
        raise ParameterError("chat_template", path, allowed) from error
