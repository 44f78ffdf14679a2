"""Servers of one model, one a mode, and the official client's answers from them."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

from inline_server import inline_server
from live import HttpServer
from openai import AsyncOpenAI, OpenAI
from openai.resources import chat as chats
from openai.resources.completions import Completions
from openai_cases import BYTES, MODEL, Case, Stop
from sizes import sized
from transformers import AutoTokenizer

#: Of servers that run; and of those that are asked each question, as off is with whose answers they are compared.
MODES = sized(("off", "async"), ("off", "sync", "async"))
ASKED = sized(("async",), MODES)
#: Whether those that are asked at once are streams, whose ends tell what whole answers do.
STREAMED = sized((True,), (False, True))
TEMPLATE = (
    "{{ tone }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MAX_BODY = 1 << 16

#: Fields that the client knows of completions and of chats; all others are ours, and go into `extra_body`.
THEIRS = {
    chat: signature(resource.create).parameters.keys() - {"timeout"}
    for chat, resource in ((False, Completions), (True, chats.Completions))
}


@dataclass
class Choice:
    """An output, whole or put together from its chunks."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: Any = None
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    calls: list[list[str]] = field(default_factory=list)  # names and arguments
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    seed: int | str | None = None
    prompt_logprobs: Any = None

    def add(self, part: Mapping[str, Any]) -> None:
        assert self.finish_reason is None  # nothing follows the end
        said = part.get("message") or part.get("delta") or {"content": part.get("text")}
        self.text += said.get("content") or ""
        for call in said.get("tool_calls") or []:
            if call.get("index", len(self.calls)) == len(self.calls):
                assert call["id"] and call["type"] == "function"
                self.calls.append([call["function"]["name"], ""])
            self.calls[-1][1] += call["function"]["arguments"]
        for name, entries in (part["logprobs"] or {}).items():
            self.logprobs.setdefault(name, []).extend(entries or [])
        self.token_ids += part.get("token_ids") or []
        for name in ("finish_reason", "stop_reason", "seed", "prompt_logprobs", "prompt_token_ids"):
            _once(self, name, part.get(name))


@dataclass
class Answer:
    """The result of a request; equal for equal outputs, however they were computed and sent."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: Any = None
    seed: int | str | None = None
    prompt_logprobs: Any = None
    prompt_token_ids: Any = None
    fingerprint: str | None = None
    drafts: Any = field(default=None, compare=False)
    cached: int = field(default=0, compare=False)  # tokens of the prompts

    def add(self, body: Mapping[str, Any]) -> None:
        """The whole, or the next chunk."""
        for part in body["choices"]:
            self.choices.setdefault(part["index"], Choice()).add(part)
        for name in ("seed", "prompt_logprobs", "prompt_token_ids"):
            _once(self, name, body.get(name))
        usage = body.get("usage")
        if usage is not None:  # how much of it was cached depends on what was asked before
            self.cached = usage["prompt_tokens_details"]["cached_tokens"]
            _once(self, "usage", {name: count for name, count in usage.items() if name != "prompt_tokens_details"})
        assert self.fingerprint in (None, body["system_fingerprint"])
        self.fingerprint = body["system_fingerprint"]
        self.drafts = (body.get("metrics") or {}).get("speculative_decoding") or self.drafts


def _once(record: object, name: str, value: Any) -> None:
    if value is not None:
        assert getattr(record, name) is None, f"{name} was said twice"
        setattr(record, name, value)


class Fleet:
    """The servers, and what each has answered: a case is asked once in each way."""

    def __init__(self, servers: Mapping[str, HttpServer], target: Path, cases: Sequence[Case]) -> None:
        self.servers, self.target, self.cases = servers, target, cases
        self.tokenizer = AutoTokenizer.from_pretrained(target)
        self._stack = ExitStack()
        self.client = cache(self._client)
        self.arguments = cache(self._arguments)
        self.whole = cache(self._whole)
        self.at_once = cache(self._at_once)

    def close(self) -> None:
        self._stack.close()

    def options(self, mode: str, *, strict: bool = False) -> dict[str, Any]:
        """Of a client; a strict one refuses what its types do not allow."""
        return {
            "base_url": f"{self.servers[mode].url}/v1",
            "api_key": "unused",
            "max_retries": 0,
            "timeout": 300,
            "_strict_response_validation": strict,
        }

    def _client(self, mode: str, *, strict: bool = False) -> OpenAI:
        return self._stack.enter_context(OpenAI(**self.options(mode, strict=strict)))

    def _arguments(self, case: Case) -> dict[str, Any]:
        """Of the client's `create`."""
        asked = {"model": MODEL, "seed": 7, **case.asked}
        if asked.get("allowed_token_ids") == BYTES:
            asked["allowed_token_ids"] = self.tokenizer.convert_tokens_to_ids(list(BYTES))
        if isinstance(asked.get("stop"), Stop):
            asked["stop"] = self._stop(case, asked["stop"])
        ours = {name: asked.pop(name) for name in asked.keys() - THEIRS[case.chat]}
        return {**asked, "extra_body": ours}

    def _stop(self, case: Case, stop: Stop) -> str | list[str]:
        without = {name: value for name, value in case.asked.items() if name not in ("stop", "min_tokens")}
        report = {"logprobs": True} if case.chat else {"logprobs": 0}
        choice = self.whole("off", Case(case.chat, f"{case.name}, without", {**without, **report})).choices[0]
        entries = choice.logprobs
        tokens = [entry["token"] for entry in entries["content"]] if case.chat else entries["tokens"]
        return stop.pick(choice.text, tokens)

    def _whole(self, mode: str, case: Case) -> Answer:
        answer = Answer()
        client = self.client(mode, strict=case.typed)
        answer.add(create(client, case)(**self.arguments(case)).model_dump())
        return answer

    def _at_once(self, mode: str, stream: bool) -> dict[Case, Answer]:
        """All cases, sent together through the asynchronous client."""
        for each in self.cases:
            self.arguments(each)
        return asyncio.run(self._gather(mode, stream))

    async def _gather(self, mode: str, stream: bool) -> dict[Case, Answer]:
        async with AsyncOpenAI(**self.options(mode)) as client:
            answers = await asyncio.gather(*(self._answer(client, each, stream) for each in self.cases))
        return dict(zip(self.cases, answers, strict=True))

    async def _answer(self, client: AsyncOpenAI, case: Case, stream: bool) -> Answer:
        answer = Answer()
        if not stream:
            answer.add((await create(client, case)(**self.arguments(case))).model_dump())
            return answer
        options = {"include_usage": True}
        async with await create(client, case)(**self.arguments(case), stream=True, stream_options=options) as events:
            async for chunk in events:
                answer.add(chunk.model_dump())
        return answer


def create(client: Any, case: Case) -> Any:
    """The client's method for a case."""
    return client.chat.completions.create if case.chat else client.completions.create


@contextmanager
def running(target: Path, draft: Path, cases: Sequence[Case], **options: Any) -> Iterator[Fleet]:
    """One server a mode."""
    options |= {"budget": "fixed", "served_model_name": (MODEL,)}
    with ExitStack() as stack:
        servers: dict[str, HttpServer] = {}
        for mode in MODES:
            own = None if mode == "off" else draft
            servers[mode] = stack.enter_context(inline_server(target, draft=own, mode=mode, **options))
        fleet = Fleet(servers, target, cases)
        stack.callback(fleet.close)
        yield fleet
