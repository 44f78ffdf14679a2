"""Requests of many kinds, with what each of them is to be answered."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pilotfish.bench.exchange import Answer
from pilotfish.bench.workload import Prompt
from pilotfish.errors import ParameterError

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
#: Tokens of a long prompt, from the shortest to the longest; the context may allow fewer.
LONG = (2000, 6000)
#: What is special about the requests of a kind.
KINDS: dict[str, dict[str, Any]] = {
    "completion": {"temperature": 0.8},
    "chat": {"temperature": 0.8},
    "greedy": {"temperature": 0.0},
    "long prompt": {"temperature": 0.8},
    "whole completion": {"temperature": 0.8, "stream": False},
    "whole chat": {"temperature": 0.8, "stream": False},
    "logprobs": {"temperature": 0.8, "logprobs": 3},
    "chat logprobs": {"temperature": 0.8, "logprobs": True, "top_logprobs": 2},
    "n=2": {"temperature": 1.0, "n": 2},
    "chat n=3": {"temperature": 1.0, "n": 3},
    "stop": {"temperature": 0.8, "stop": ["\n\n", "return"]},
    "penalties": {"temperature": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.1, "top_p": 0.9},
}


@dataclass(frozen=True)
class Asked:
    """A request: its seed is fixed, so its answer is."""

    kind: str
    path: str
    body: dict[str, Any]

    @property
    def stream(self) -> bool:
        return bool(self.body["stream"])


@dataclass
class Output:
    """One output of an answer, its chunks joined."""

    text: str = ""
    finish: tuple[Any, Any] = (None, None)  # finish_reason, stop_reason
    logprobs: list[Any] = field(default_factory=list)  # one entry a token

    def begins(self, other: Output) -> bool:
        """Whether `other` goes on where this one was cut off."""
        cut = other.logprobs[: len(self.logprobs)] == self.logprobs and other.text.startswith(self.text)
        return cut and self.finish in ((None, None), other.finish)


def mixed(prompts: Sequence[Prompt], tokenizer: Any, context: int, number: int, max_tokens: int) -> list[Asked]:
    """`number` distinct requests, of all kinds in turn; chats only where the model has a template."""
    names = [name for name in KINDS if tokenizer.chat_template is not None or "chat" not in name]
    draw = random.Random(0)
    return [_asked(names[i % len(names)], i, prompts, tokenizer, context, max_tokens, draw) for i in range(number)]


def _asked(
    kind: str,
    index: int,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    context: int,
    max_tokens: int,
    draw: random.Random,
) -> Asked:
    text: str | list[int] = prompts[index % len(prompts)].text
    if kind == "long prompt":
        room = context - max_tokens
        text = joined(prompts, tokenizer, min(draw.randint(*LONG), room), first=index)
    length = draw.randint(max_tokens // 2 or 1, max_tokens)
    body = {"max_tokens": length, "seed": 1000 + index, "stream": True, **KINDS[kind]}
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if "chat" in kind:
        return Asked(kind, CHATS, {**body, "messages": [{"role": "user", "content": text}]})
    return Asked(kind, COMPLETIONS, {**body, "prompt": text})


def joined(prompts: Sequence[Prompt], tokenizer: Any, tokens: int, first: int) -> list[int]:
    """A prompt of so many tokens: whole prompts from the `first` on, the last one cut."""
    found: list[int] = []
    for turn in range(tokens):
        found += tokenizer.encode(prompts[(first + turn) % len(prompts)].text)
        if len(found) >= tokens:
            return found[:tokens]
    raise ParameterError("prompts", len(prompts), f"prompts that fill {tokens} tokens")


def outputs(answer: Answer) -> dict[int, Output]:
    """By index."""
    found: defaultdict[int, Output] = defaultdict(Output)
    for choice in (choice for event in answer.events for choice in event.data.get("choices", ())):
        output = found[choice["index"]]
        said = choice.get("delta") or choice.get("message")
        output.text += (said.get("content") or "") if said is not None else choice.get("text", "")
        output.logprobs += _entries(choice.get("logprobs"))
        if choice.get("finish_reason") is not None:
            output.finish = (choice["finish_reason"], choice.get("stop_reason"))
    return dict(found)


def _entries(logprobs: dict[str, Any] | None) -> list[Any]:
    if not logprobs:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"))
    return [list(row) for row in zip(*columns, strict=True)]


def agrees(answer: Answer, expected: dict[int, Output]) -> bool:
    """Whether an answer is the expected one or, where it was cut off, a beginning of it."""
    found = outputs(answer)
    if answer.ended:
        return found == expected
    return all(index in expected and output.begins(expected[index]) for index, output in found.items())
