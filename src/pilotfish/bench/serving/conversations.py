"""Prompt files as sessions: our JSON Lines of prompt or turns, and ShareGPT's JSON of conversations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from pilotfish.bench.serving.options import ServeBenchOptions
from pilotfish.bench.serving.requests import Message, RequestSession, ServerRequest
from pilotfish.errors import InputError, PromptError
from pilotfish.prompts import BadRow, Row, read_rows

#: max_tokens of a row that has no answer.
ANSWER = 128
#: Of ShareGPT's and of OpenAI's roles.
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def read_conversations(options: ServeBenchOptions, tokenizer: Any) -> list[RequestSession]:
    """A session for each row. A turn's answer may be as long as --answer-tokens says, or as the one that the file has.
    PromptError or InputError names the first row that is none."""
    assert options.prompts is not None
    if (entries := _sharegpt(options.prompts)) is not None:
        found = [_conversation(entry, f"{options.prompts}: entry {i}", options, tokenizer) for i, entry in entries]
        if not (whole := [session for session in found if session.turns]):
            raise InputError(f"prompts: {options.prompts} has no conversation with a message of a user")
        return whole
    return [_session(row, options) for row in read_rows(options.prompts)]


def _session(row: Row | BadRow, options: ServeBenchOptions) -> RequestSession:
    if isinstance(row, BadRow):
        raise PromptError(f"{row.place}: {row.reason}")
    if not all(row.texts):
        raise PromptError(f"{row.place}: a text is empty")
    name, answer = str(row.id), options.answer_tokens or ANSWER
    if not row.chat:
        return RequestSession([ServerRequest(name, row.category, answer, prompt=row.texts[0], session=name)])
    turns = [
        ServerRequest(f"{name}.{i}", row.category, answer, [{"role": "user", "content": text}], session=name, turn=i)
        for i, text in enumerate(row.texts)
    ]
    return RequestSession(turns)


def _sharegpt(path: Path) -> list[tuple[int, Any]] | None:
    """Entries with their numbers, of a list of them or of JSON Lines; None where it is another kind of file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"prompts: {path} cannot be read: {error.strerror}") from error
    if data.lstrip()[:1] == b"[":
        try:
            return list(enumerate(msgspec.json.decode(data, type=list[Any]), 1))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(f"prompts: {path} is not JSON: {error}") from error
    try:
        rows = [(i, msgspec.json.decode(line)) for i, line in enumerate(data.splitlines(), 1) if line.strip()]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # `read_rows` says where
    return rows if rows and isinstance(rows[0][1], dict) and "conversations" in rows[0][1] else None


def _conversation(entry: Any, place: str, options: ServeBenchOptions, tokenizer: Any) -> RequestSession:
    name = str(entry.get("id", place)) if isinstance(entry, dict) else place
    turns: list[ServerRequest] = []
    for messages, answer in _exchanges(_messages(entry, place)):
        known = len(tokenizer.encode(answer, add_special_tokens=False).ids) if answer else ANSWER
        tokens, turn = options.answer_tokens or known, len(turns)
        turns.append(ServerRequest(f"{name}.{turn}", "sharegpt", tokens, messages, session=name, turn=turn))
    return RequestSession(turns)


def _messages(entry: Any, place: str) -> list[Message]:
    try:
        messages: list[Message] = [
            {"role": ROLES[row.get("from", row.get("role"))], "content": row.get("value", row.get("content"))}
            for row in entry["conversations"]
        ]
    except (AttributeError, KeyError, TypeError) as error:
        allowed = "an object with conversations, a list of {from, value} with from human, gpt or system"
        raise PromptError(f"{place} is not allowed ({error!r}); expected {allowed}") from error
    if not all(isinstance(message["content"], str) for message in messages):
        raise PromptError(f"{place}: the value of a message is no text")
    return messages


def _exchanges(messages: list[Message]) -> Iterator[tuple[list[Message], str]]:
    """What is said before each answer, and the answer; empty where there is none. An answer before anybody has asked is
    left out."""
    new: list[Message] = []
    for message in messages:
        if message["role"] != "assistant":
            new.append(message)
        elif any(one["role"] == "user" for one in new):
            yield new, str(message["content"])
            new = []
    if any(one["role"] == "user" for one in new):
        yield new, ""
