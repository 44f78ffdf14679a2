"""The tokens of what a request gives as its prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from inspect import signature
from typing import Any, TypeVar, cast

from pilotfish.errors import PromptError
from pilotfish.prompts import chat_prompt
from pilotfish.server.failures import HttpError, bad
from pilotfish.server.requests import ChatRequest, CompletionRequest, GenerationRequest, Message, TokenizeRequest

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


async def chat_tokens(request: ChatRequest | TokenizeRequest, tokenizer: Any) -> list[int]:
    """Of the chat template around the messages. HttpError where it refuses them."""
    messages = request.messages
    if not messages:
        raise bad("messages", [], "a list of at least one message")
    for i, message in enumerate(messages):
        if message.content is None:
            raise HttpError(400, f"messages[{i}].content: it is missing", param=f"messages[{i}].content")
    plain, template = [_plain(message) for message in messages], _template(request, tokenizer)
    special = request.add_special_tokens is True
    try:
        size = sum(len(message["content"]) for message in plain)
        return await _tokenize(size, lambda: chat_prompt(plain, tokenizer, template, special=special))
    except PromptError as error:
        raise HttpError(400, str(error), param="messages") from error


async def chat_prompt_of(request: ChatRequest, tokenizer: Any) -> Prompt:
    """HttpError names `messages` where nothing comes of them."""
    tokens = await chat_tokens(request, tokenizer)
    if not tokens:
        message = "messages: the chat template makes nothing of them; at least one token is needed"
        raise HttpError(400, message, param="messages")
    return Prompt(tokens)


def _template(request: ChatRequest | TokenizeRequest, tokenizer: Any) -> dict[str, Any]:
    """Arguments of the chat template, beside the messages."""
    own, goes_on = request.chat_template_kwargs or {}, bool(request.continue_final_message)
    if goes_on and request.add_generation_prompt:
        raise bad("add_generation_prompt", True, "false with continue_final_message")
    reserved = {"messages", "conversations", *signature(tokenizer.apply_chat_template).parameters}
    if taken := sorted(reserved & own.keys()):
        raise bad("chat_template_kwargs", taken[0], "names that only the chat template gives a meaning to")
    begins = not goes_on and request.add_generation_prompt is not False
    return {**own, "add_generation_prompt": begins, "continue_final_message": goes_on}


async def _tokenize(size: int, work: Callable[[], Result]) -> Result:
    if size <= SHORT:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_thread, work)


def _plain(message: Message) -> dict[str, str]:
    """As templates know it: `developer` is what newer clients call the system."""
    role = "system" if message.role == "developer" else message.role
    named = {"name": message.name} if message.name is not None else {}
    return {"role": role, "content": message.text, **named}


def truncated(prompt: Prompt, request: GenerationRequest, most: int) -> Prompt:
    """The part of a prompt that the request keeps, of which at most `most` tokens fit beside the output."""
    keep = request.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep < 1 and keep != -1:
        raise bad("truncate_prompt_tokens", keep, "-1, or an integer of at least 1")
    keep = max(1, most) if keep == -1 else keep
    if len(prompt.tokens) <= keep:
        return prompt
    return Prompt(prompt.tokens[:keep] if request.truncation_side == "right" else prompt.tokens[-keep:])


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
