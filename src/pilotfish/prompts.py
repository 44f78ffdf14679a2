"""Prompt files are JSON Lines of {"id", "prompt"} or {"id", "turns": [text, …]}, maybe with a "category"."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

from pilotfish.errors import InputError, ParameterError, PromptError


@dataclass(frozen=True)
class Row:
    id: str | int
    texts: tuple[str, ...]
    chat: bool  # user messages, to which the model's chat template applies
    place: str
    category: str = ""


@dataclass(frozen=True)
class BadRow:
    place: str
    reason: str
    failed: bool = False  # the engine is to blame, not the row


def read_rows(path: Path) -> list[Row | BadRow]:
    """Rows in order. InputError if there are none."""
    rows = [_row(line, place) for place, line in lines_of("prompts", path)]
    if not rows:
        raise InputError(f"prompts: {path} has no rows; one JSON object a line is needed")
    return rows


def lines_of(field: str, path: Path) -> list[tuple[str, bytes]]:
    """Lines that are not blank, each with its place. InputError, naming `field`, for a file that cannot be read."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"{field}: {path} cannot be read: {error.strerror}") from error
    return [(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def _row(line: bytes, place: str) -> Row | BadRow:
    try:
        fields = json.loads(line)
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        return BadRow(place, f"row: it is not JSON: {error}")
    if (problem := _problem(fields)) is not None:
        return BadRow(place, problem)
    chat = "turns" in fields
    texts = tuple(fields["turns"] if chat else (fields["prompt"],))
    return Row(fields["id"], texts, chat=chat, place=place, category=fields.get("category", ""))


def _problem(row: Any) -> str | None:
    """The bad field and what is allowed; None for a valid row."""
    if not isinstance(row, dict):
        return _refused("row", row, "an object")
    if not isinstance(row.get("id"), str | int) or isinstance(row["id"], bool):
        return _refused("id", row.get("id"), "a string or an integer")
    if not isinstance(row.get("category", ""), str):
        return _refused("category", row["category"], "text")
    if ("prompt" in row) == ("turns" in row):
        return "row: exactly one of prompt and turns is needed"
    field, texts = ("turns", row["turns"]) if "turns" in row else ("prompt", [row["prompt"]])
    if not isinstance(texts, list) or not texts:
        return _refused(field, texts, "a list of texts")
    return next((_refused(field, text, "text") for text in texts if not isinstance(text, str)), None)


def _refused(field: str, value: object, expected: str) -> str:
    text = repr(value)
    return f"{field}: {text if len(text) <= 60 else text[:57] + '…'} is not allowed; expected {expected}"


def prompt_of(row: Row, tokenizer: Any, *, raw: bool) -> str | Sequence[int]:
    if not row.chat or raw or not tokenizer.chat_template:
        return "\n".join(row.texts)
    if not all(row.texts):
        raise PromptError("turns: a text is empty; at least one character is needed")
    return chat_prompt([{"role": "user", "content": text} for text in row.texts], tokenizer)


def chat_prompt(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    template: Mapping[str, Any] | None = None,
    *,
    special: bool = False,
) -> list[int]:
    """Messages are {role, content}; the tokens end where the answer begins. `template` holds more template arguments;
    `special` adds the tokenizer's own tokens around a text. PromptError where the template fails or lacks."""
    arguments = {"add_generation_prompt": True, **(template or {})}
    if not (tokenizer.chat_template or arguments.get("chat_template")):
        raise PromptError("messages: the model has no chat template; give it one, or continue a text as it is")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
    except Exception as error:  # a template is a program: it may raise anything
        raise PromptError(f"messages: the chat template refuses them: {error}") from error
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=special)
    return tokens


def template_arguments(tokenizer: Any, own: Mapping[str, Any], *, begins: bool | None, goes_on: bool) -> dict[str, Any]:
    """`own` and whether an answer `begins` (None: unless the last message `goes_on`). ParameterError for conflicts."""
    if goes_on and begins:
        raise ParameterError("add_generation_prompt", begins, "false with continue_final_message")
    reserved = {"messages", "conversations", *signature(tokenizer.apply_chat_template).parameters}
    if taken := sorted(reserved & own.keys()):
        allowed = "names that only the chat template gives a meaning to"
        raise ParameterError("chat_template_kwargs", taken[0], allowed)
    return {**own, "add_generation_prompt": not goes_on and begins is not False, "continue_final_message": goes_on}


def marks_turns(tokenizer: Any) -> bool:
    """Whether the chat template puts anything around a message; the bundled pair's, for example, only joins texts."""
    if not tokenizer.chat_template:
        return False
    plain: list[int] = tokenizer.encode("?", add_special_tokens=False)
    try:
        return chat_prompt([{"role": "user", "content": "?"}], tokenizer) != plain
    except PromptError:  # it asks for other messages, which is a mark
        return True


def read_chat_template(given: str) -> str:
    """The template in the file `given`, or `given` itself, with \\n as a newline, if it cannot be a file's name.
    ParameterError for an unreadable file or no template."""
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
