from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pilotfish.errors import InputError, ParameterError, PromptError
from pilotfish.progress import PhaseProgress
from pilotfish.prompts import chat_prompt, lines_of
from pilotfish.train.recipes import TaughtRecipe
from pilotfish.train.taught_target import TaughtTarget
from pilotfish.train.text.data import Tokens, collect, split, token_type

FIELDS = ("text", "tokens", "prompt", "messages", "conversations", "turns")


class ChatMessage(msgspec.Struct):
    role: str
    content: str


class DataLine(msgspec.Struct):
    text: str | None = None
    tokens: list[int] | None = None
    prompt: str | None = None
    response: str | None = None
    messages: list[ChatMessage] | None = None
    conversations: list[ChatMessage] | None = None
    turns: list[str] | None = None


@dataclass(frozen=True)
class Passage:
    name: str  # where it came from
    tokens: list[int]
    open: bool = False  # a prompt, which the target is to answer


@dataclass(frozen=True)
class Passages:
    text: Tokens  # [tokens]: those that are whole, an end token after each
    prompts: tuple[Tokens, ...]  # those that are open


def read_passages(recipe: TaughtRecipe, target: TaughtTarget, progress: PhaseProgress) -> tuple[Passages, Passages]:
    """To train on, and held out. InputError or ParameterError for invalid data, and for rows beyond the context."""
    length, context = recipe.sequence_length, target.config.context
    if length > context:
        raise ParameterError("sequence_length", length, f"at most the target's context, {context}")
    with progress.phase("reading the text"):
        return passages_of(recipe, target.tokenizer)


def passages_of(recipe: TaughtRecipe, tokenizer: Any) -> tuple[Passages, Passages]:
    lines = [passage for path in recipe.data for passage in _read(path, tokenizer)]
    documents = collect(recipe.sources, recipe.packages) if recipe.sources or not recipe.data else []
    if len(lines) == 1:
        raise InputError("data: 1 passage is too little; two or more are needed")
    training, held_out = split(lines, ()) if lines else ([], [])
    if documents:
        for part, chosen in zip(split(documents, recipe.held_out), (training, held_out), strict=True):
            chosen += [Passage(document.name, tokenizer.encode(document.text)) for document in part]
    return _joined(training, tokenizer), _joined(held_out, tokenizer)


def _joined(passages: Sequence[Passage], tokenizer: Any) -> Passages:
    kind = token_type(len(tokenizer))
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    whole = [np.array([*passage.tokens, *end], kind) for passage in passages if not passage.open]
    prompts = tuple(np.array(passage.tokens, kind) for passage in passages if passage.open)
    return Passages(np.concatenate([np.empty(0, kind), *whole]), prompts)


def _read(path: Path, tokenizer: Any) -> Iterable[Passage]:
    decoder, found = msgspec.json.Decoder(DataLine), False
    for place, line in lines_of("data", path):
        try:
            passage = _passage(decoder.decode(line), place, tokenizer)
        except (msgspec.DecodeError, PromptError, UnicodeDecodeError) as error:
            raise InputError(f"data: {place}: {error}") from error
        found = found or bool(passage.tokens)
        yield passage
    if not found:
        raise InputError(f"data: {path} has no text; one JSON object a line with one of {', '.join(FIELDS)} is needed")


def _passage(line: DataLine, place: str, tokenizer: Any) -> Passage:
    given = [name for name in FIELDS if getattr(line, name) is not None]
    if len(given) != 1:
        raise InputError(f"data: {place}: {given} is not allowed; expected one of {', '.join(FIELDS)}")
    if line.tokens is not None:
        vocab = len(tokenizer)
        if wrong := [token for token in line.tokens if not 0 <= token < vocab]:
            allowed = f"ids below {vocab}, the target's"
            raise InputError(f"data: {place}: tokens: {wrong[0]} is not allowed; expected {allowed}")
        return Passage(place, line.tokens)
    if line.text is not None:
        return Passage(place, tokenizer.encode(line.text))
    answer = line.response
    if line.prompt is not None:
        asked = tokenizer.encode(line.prompt)
    else:
        messages = [{"role": "user", "content": turn} for turn in line.turns or ()]
        messages += [msgspec.to_builtins(message) for message in line.messages or line.conversations or ()]
        if messages and messages[-1]["role"] == "assistant":
            answer = messages.pop()["content"]
        joined = "\n".join(message["content"] for message in messages)
        asked = chat_prompt(messages, tokenizer) if tokenizer.chat_template else tokenizer.encode(joined)
    if answer is None:
        return Passage(place, asked, open=True)
    return Passage(place, asked + tokenizer.encode(answer, add_special_tokens=False))
