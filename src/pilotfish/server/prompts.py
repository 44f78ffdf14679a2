"""The tokens of what a request gives as its prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from pilotfish.errors import PromptError
from pilotfish.prompts import chat_prompt
from pilotfish.server.failures import HttpError, bad
from pilotfish.server.requests import CompletionRequest, Message

#: Characters or tokens up to which tokenizing is so fast that the event loop does it itself.
SHORT = 2048

Result = TypeVar("Result")
_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    text: str | None = None  # where it was given as one


async def text_tokens(text: str, tokenizer: Any, *, special: bool = True) -> list[int]:
    """Of a text, with the tokens that the tokenizer puts around one where `special`."""
    return await _tokenize(len(text), lambda: cast(list[int], tokenizer.encode(text, add_special_tokens=special)))


async def tokens_text(tokens: list[int], tokenizer: Any) -> str:
    """Of tokens, special ones too."""
    return await _tokenize(len(tokens), lambda: cast(str, tokenizer.decode(tokens)))


async def chat_tokens(messages: Sequence[Message], tokenizer: Any) -> list[int]:
    """Of the chat template around messages. HttpError where it refuses them."""
    if not messages:
        raise bad("messages", [], "a list of at least one message")
    plain = [_plain(message) for message in messages]
    try:
        return await _tokenize(sum(len(m["content"]) for m in plain), lambda: chat_prompt(plain, tokenizer))
    except PromptError as error:
        raise HttpError(400, str(error), param="messages") from error


async def _tokenize(size: int, work: Callable[[], Result]) -> Result:
    if size <= SHORT:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_thread, work)


def _plain(message: Message) -> dict[str, str]:
    """As templates know it: `developer` is what newer clients call the system."""
    role = "system" if message.role == "developer" else message.role
    named = {"name": message.name} if message.name is not None else {}
    return {"role": role, "content": message.text, **named}


async def completion_prompts(request: CompletionRequest, tokenizer: Any, most: int) -> list[Prompt]:
    """All prompts of a completion, at most `most`. HttpError names `prompt` for what is none."""
    given = _each(request.prompt)
    if not 0 < len(given) <= most:
        raise HttpError(400, f"prompt: {len(given)} prompts are not allowed; expected 1 to {most}", param="prompt")
    special = request.add_special_tokens is not False
    return [await _prompt(one, tokenizer, special=special) for one in given]


def _each(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(part) for part in prompt}
    if kinds == {int}:
        return [cast(list[int], prompt)]
    if int in kinds:
        raise bad("prompt", prompt, "a text, a list of tokens, or a list of either")
    return cast(list[str | list[int]], prompt)


async def _prompt(given: str | list[int], tokenizer: Any, *, special: bool) -> Prompt:
    if isinstance(given, str):
        return Prompt(_not_empty(await text_tokens(given, tokenizer, special=special), given), given)
    for token in _not_empty(given, given):
        if not 0 <= token < len(tokenizer):
            raise bad("prompt", token, f"token ids 0 to {len(tokenizer) - 1}")
    return Prompt(given)


def _not_empty(tokens: list[int], given: str | list[int]) -> list[int]:
    if not tokens:
        raise bad("prompt", given, "at least one token")
    return tokens
