"""From a body to what the engine is given: tokens of its prompts, and SamplingParams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from inspect import signature
from typing import Any, TypeVar, cast

from pilotfish.config import MetricsLevel, ServerConfig
from pilotfish.core.sampling_params import MAX_LOGPROBS, SAMPLING_OPTIONS, SamplingParams
from pilotfish.errors import PromptError
from pilotfish.prompts import chat_prompt
from pilotfish.server.requests import (
    SEED,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
    SamplingFields,
    SpeculationOptions,
    StreamOptions,
    TokenizeRequest,
)
from pilotfish.server.responses import HttpError, bad, bad_request
from pilotfish.wire.serving import Identity

#: OpenAI's, of a completion that gives no limit.
COMPLETION_TOKENS = 16
#: Characters or tokens up to which tokenizing is so fast that the event loop does it itself.
SHORT = 2048

Result = TypeVar("Result")
_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")


@dataclass(frozen=True)
class TokenizedPrompt:
    tokens: list[int]
    text: str | None = None  # where it was given as one


@dataclass(frozen=True)
class Generation:
    """A request that can be served: what the engine is given, and what the answer says beside the outputs."""

    body: GenerationRequest
    id: str
    created: int  # Unix time, seconds
    model: str
    fingerprint: str
    target: Identity
    prompts: tuple[TokenizedPrompt, ...]
    params: SamplingParams  # of each prompt
    max_nodes: int | None  # of a tree; 0: no speculation, None: as the target does
    cache_salt: str | None
    timeout: float  # seconds
    metrics: MetricsLevel

    @property
    def chat(self) -> bool:
        return isinstance(self.body, ChatRequest)

    @property
    def stream(self) -> bool:
        return bool(self.body.stream)

    @property
    def stream_options(self) -> StreamOptions:
        return self.body.stream_options or StreamOptions()

    @property
    def detail(self) -> bool:
        return self.body.speculation is not None and bool(self.body.speculation.detail)

    @property
    def outputs(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def tag(self) -> Any:
        """What the client says that the request is for; None: nothing."""
        return self.body.metadata.get("tag") if isinstance(self.body.metadata, dict) else None

    @property
    def only_echo(self) -> bool:
        return only_echo(self.body)

    @property
    def echoed(self) -> str:
        """The beginning of a chat's answer: the last message, if the assistant goes on with it."""
        last = self.body.messages[-1] if isinstance(self.body, ChatRequest) and self.body.echo else None
        return last.text if last is not None and last.role == "assistant" else ""


@dataclass(frozen=True)
class Room:
    """Tokens that the target can hold of one prompt and its output."""

    target: Identity
    prompt: int = 0  # of the longest prompt

    @property
    def most(self) -> int:
        return min(self.target.context, self.target.kv_slots)

    @property
    def left(self) -> int:
        """For an output."""
        return self.most - self.prompt

    @property
    def bound(self) -> str:
        """Whose limit `most` is."""
        return "the context" if self.target.context <= self.target.kv_slots else "the target's KV pool"


# -- sampling parameters


def sampling_params(
    request: GenerationRequest, defaults: Mapping[str, Any], room: Room, config: ServerConfig
) -> SamplingParams:
    """The request's fields over the model's `defaults`. HttpError or ParameterError names the first bad field."""
    given = {name: getattr(request, name) for name in SamplingFields.__struct_fields__}
    values = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    _check_lengths(given)
    values["seed"] = _seed(request.seed)
    values["logit_bias"] = _logit_bias(request.logit_bias or {})
    values["logprobs"] = logprobs = _num_logprobs(request)
    if isinstance(request, CompletionRequest) and request.echo and logprobs is not None:
        values["prompt_logprobs"] = max(logprobs, request.prompt_logprobs or 0)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise bad("best_of", request.best_of, "n, as choosing among more outputs is not supported")
    if request.n is not None and not 1 <= request.n <= config.max_n:
        raise bad("n", request.n, f"an integer 1 to {config.max_n}")
    values["max_tokens"] = _max_tokens(request, defaults.get("max_tokens"), room, config.default_max_tokens)
    return SamplingParams(**values)


def _check_lengths(given: Mapping[str, Any]) -> None:
    """SamplingParams' own errors would quote all entries."""
    for name, value in given.items():
        most = SAMPLING_OPTIONS[name].high
        if isinstance(value, list | dict) and most is not None and len(value) > most:
            raise bad_request(name, f"{len(value)} entries are not allowed; expected at most {most}")


def _seed(given: int | str | None) -> int | None:
    """Digits as text are for clients whose JSON knows no integers above 2**53. -1 is none, as vLLM has it."""
    if not isinstance(given, str):
        return None if given == -1 else given
    if not (given.isascii() and given.isdecimal() and len(given) <= 20):
        raise bad("seed", given, SEED)
    return int(given)


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    for key in given:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise bad("logit_bias", key, "token ids as keys")
    return {int(key): bias for key, bias in given.items()}


def _num_logprobs(request: GenerationRequest) -> int | None:
    """Likeliest tokens to report of each token of the output; None: no log-probabilities at all."""
    if isinstance(request, CompletionRequest):
        return request.logprobs
    assert isinstance(request, ChatRequest)
    top = request.top_logprobs
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise bad("top_logprobs", top, f"an integer 0 to {MAX_LOGPROBS}")
    if top and not request.logprobs:
        raise bad("logprobs", request.logprobs, "true with top_logprobs")
    return (top or 0) if request.logprobs else None


def only_echo(request: GenerationRequest) -> bool:
    """Whether only the prompt is wanted."""
    return isinstance(request, CompletionRequest) and bool(request.echo) and request.max_tokens == 0


def _max_tokens(request: GenerationRequest, model_default: int | None, room: Room, config_default: int) -> int:
    """Of one output. HttpError where there is no room for it."""
    field, asked = _limit(request)
    if asked is not None and asked < 1 and not only_echo(request):
        with_echo = ", or 0 with echo" if isinstance(request, CompletionRequest) else ""
        raise bad(field, asked, f"an integer of at least 1{with_echo}")
    _check_room(request, room)
    if asked is not None:
        return max(asked, 1)
    completion = COMPLETION_TOKENS if isinstance(request, CompletionRequest) else None
    return min(most for most in (completion, model_default, config_default, room.left) if most)


def _check_room(request: GenerationRequest, room: Room) -> None:
    """HttpError names the prompt if it leaves no room for an output, else the limit that is too large."""
    (field, asked), least = _limit(request), request.min_tokens or 0
    if room.left < 1:
        field = "prompt" if isinstance(request, CompletionRequest) else "messages"
        problem = (
            f"{room.prompt} tokens are not allowed; expected at most {room.most - 1}: {room.bound} has {room.most}"
        )
    elif max(asked or 0, least) > room.left:
        field = field if (asked or 0) >= least else "min_tokens"
        problem = (
            f"{max(asked or 0, least)} is not allowed; expected at most {room.left}: the prompt has {room.prompt} "
            f"tokens, {room.bound} {room.most}"
        )
    else:
        return
    raise bad_request(field, problem, "context_length_exceeded")


def _limit(request: GenerationRequest) -> tuple[str, int | None]:
    """The field that limits the output's tokens, and its value."""
    if not isinstance(request, ChatRequest) or request.max_completion_tokens is None:
        return "max_tokens", request.max_tokens
    if request.max_tokens not in (None, request.max_completion_tokens):
        raise bad("max_tokens", request.max_tokens, f"max_completion_tokens, {request.max_completion_tokens}")
    return "max_completion_tokens", request.max_completion_tokens


def max_nodes(speculation: SpeculationOptions, target: Identity) -> int | None:
    """Of a tree; 0: no speculation, None: as the target does. HttpError for what the target does not do."""
    if speculation.mode not in (None, "off", target.mode):
        raise bad("speculation.mode", speculation.mode, " or ".join(sorted({"off", target.mode})))
    nodes = speculation.max_nodes
    if nodes is not None and not 0 <= nodes <= target.max_nodes:
        raise bad("speculation.max_nodes", nodes, f"an integer 0 to {target.max_nodes}")
    return 0 if speculation.mode == "off" else nodes


def request_timeout(asked: float | None, most: float) -> float:
    """Seconds that the request may take."""
    if asked is not None and not 0 < asked <= 1e9:
        raise bad("timeout", asked, "a number of seconds, more than 0")
    return min(asked or most, most)


# -- prompts


async def text_tokens(text: str, tokenizer: Any, *, special: bool = True) -> list[int]:
    """`special` adds the tokens that the tokenizer puts around a text."""
    return await _tokenize(len(text), lambda: cast(list[int], tokenizer.encode(text, add_special_tokens=special)))


async def tokens_text(tokens: list[int], tokenizer: Any) -> str:
    """Special tokens show."""
    return await _tokenize(len(tokens), lambda: cast(str, tokenizer.decode(tokens)))


async def _tokenize(size: int, work: Callable[[], Result]) -> Result:
    if size <= SHORT:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_thread, work)


async def chat_tokens(request: ChatRequest | TokenizeRequest, tokenizer: Any) -> list[int]:
    """Tokens of the chat template around the messages. HttpError where it refuses them."""
    messages = request.messages
    if not messages:
        raise bad("messages", [], "a list of at least one message")
    for i, message in enumerate(messages):
        if message.content is None:
            raise bad_request(f"messages[{i}].content", "it is missing")
    plain, arguments = [_plain(message) for message in messages], _template_arguments(request, tokenizer)
    special = request.add_special_tokens is True
    try:
        size = sum(len(message["content"]) for message in plain)
        return await _tokenize(size, lambda: chat_prompt(plain, tokenizer, arguments, special=special))
    except PromptError as error:
        raise HttpError(400, str(error), param="messages") from error


async def chat_prompts(request: ChatRequest, tokenizer: Any) -> list[TokenizedPrompt]:
    """The only prompt of a chat."""
    tokens = await chat_tokens(request, tokenizer)
    if not tokens:
        raise bad_request("messages", "the chat template makes nothing of them; at least one token is needed")
    return [TokenizedPrompt(tokens)]


def _template_arguments(request: ChatRequest | TokenizeRequest, tokenizer: Any) -> dict[str, Any]:
    own, goes_on = request.chat_template_kwargs or {}, bool(request.continue_final_message)
    if goes_on and request.add_generation_prompt:
        raise bad("add_generation_prompt", True, "false with continue_final_message")
    reserved = {"messages", "conversations", *signature(tokenizer.apply_chat_template).parameters}
    if taken := sorted(reserved & own.keys()):
        raise bad("chat_template_kwargs", taken[0], "names that only the chat template gives a meaning to")
    begins = not goes_on and request.add_generation_prompt is not False
    return {**own, "add_generation_prompt": begins, "continue_final_message": goes_on}


def _plain(message: Message) -> dict[str, str]:
    """As templates know it: `developer` is the newer name of the system."""
    role = "system" if message.role == "developer" else message.role
    named = {"name": message.name} if message.name is not None else {}
    return {"role": role, "content": message.text, **named}


async def completion_prompts(request: CompletionRequest, tokenizer: Any, most: int) -> list[TokenizedPrompt]:
    """At most `most`. HttpError names `prompt` for a bad one."""
    given = _each(request.prompt)
    if not 0 < len(given) <= most:
        raise bad_request("prompt", f"{len(given)} prompts are not allowed; expected 1 to {most}")
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


async def _prompt(given: str | list[int], tokenizer: Any, *, special: bool) -> TokenizedPrompt:
    text = given if isinstance(given, str) else None
    tokens = given if not isinstance(given, str) else await text_tokens(given, tokenizer, special=special)
    if not tokens:
        raise bad("prompt", given, "at least one token")
    if text is None:
        check_token_ids("prompt", tokens, tokenizer)
    return TokenizedPrompt(tokens, text)


def check_token_ids(field: str, tokens: list[int], tokenizer: Any) -> None:
    size = len(tokenizer)
    for token in tokens:
        if not 0 <= token < size:
            raise bad(field, token, f"token ids 0 to {size - 1}")


def kept(prompts: list[TokenizedPrompt], request: GenerationRequest, room: Room) -> tuple[TokenizedPrompt, ...]:
    """The parts of the prompts that the request keeps: all, or as many tokens as it says or as fit beside the
    output."""
    keep = request.truncate_prompt_tokens
    if keep is None:
        return tuple(prompts)
    if keep < 1 and keep != -1:
        raise bad("truncate_prompt_tokens", keep, "-1, or an integer of at least 1")
    keep = max(1, room.most - _reserved_tokens(request)) if keep == -1 else keep
    part = slice(keep) if request.truncation_side == "right" else slice(-keep, None)
    return tuple(p if len(p.tokens) <= keep else TokenizedPrompt(p.tokens[part]) for p in prompts)


def _reserved_tokens(request: GenerationRequest) -> int:
    """For an output, beside a prompt that is cut to what fits."""
    plain = COMPLETION_TOKENS if isinstance(request, CompletionRequest) else 1
    asked = _limit(request)[1]
    return max(plain if asked is None else asked, request.min_tokens or 0, 1)
