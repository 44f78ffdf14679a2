"""A request's fields as the engine's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pilotfish.config import ServerConfig
from pilotfish.core.sampling_params import MAX_LOGPROBS, MAX_TOKEN_IDS, SAMPLING_OPTIONS, SamplingParams
from pilotfish.server.failures import HttpError, bad
from pilotfish.server.requests import ALLOWED, ChatRequest, CompletionRequest, GenerationRequest, Speculation
from pilotfish.wire.serving import Identity

#: OpenAI's, of a completion that gives no limit.
COMPLETION_TOKENS = 16

_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "n",
)
_LISTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids")


@dataclass(frozen=True)
class Room:
    """What the context, and the target's KV pool, leave beside the longest prompt. Tokens."""

    context: int
    kv_slots: int
    prompt: int = 0

    @property
    def most(self) -> int:
        """Of prompt and output together."""
        return min(self.context, self.kv_slots)

    @property
    def left(self) -> int:
        """For an output."""
        return self.most - self.prompt

    @property
    def bound(self) -> str:
        """Whose limit `most` is."""
        return "the context" if self.context <= self.kv_slots else "the target's KV pool"


def sampling_params(
    request: GenerationRequest, defaults: Mapping[str, Any], room: Room, config: ServerConfig
) -> SamplingParams:
    """Over the model's `defaults`. HttpError or ParameterError names the first field that cannot be."""
    values = dict(defaults)
    values.update({name: getattr(request, name) for name in _SAME if getattr(request, name) is not None})
    values.update(_lists(request))
    values["seed"] = _seed(request.seed)
    values["logit_bias"] = _logit_bias(request.logit_bias or {})
    values["logprobs"] = logprobs = num_logprobs(request)
    values["prompt_logprobs"] = request.prompt_logprobs
    if isinstance(request, CompletionRequest) and request.echo and logprobs is not None:
        values["prompt_logprobs"] = max(logprobs, request.prompt_logprobs or 0)
    _check_best_of(request)
    if request.n is not None and not 1 <= request.n <= config.max_n:
        raise bad("n", request.n, f"an integer 1 to {config.max_n}")
    values["max_tokens"] = max_tokens(request, defaults.get("max_tokens"), room, config.default_max_tokens)
    return SamplingParams(**values)


def _seed(given: int | str | None) -> int | None:
    """Digits as text are for clients whose JSON knows no integers above 2**53. -1 is none, as vLLM has it."""
    if not isinstance(given, str):
        return None if given == -1 else given
    if not (given.isascii() and given.isdecimal() and len(given) <= 20):
        raise bad("seed", given, ALLOWED["seed"])
    return int(given)


def _lists(request: GenerationRequest) -> dict[str, tuple[Any, ...]]:
    found = {}
    for name in _LISTS:
        value, most = getattr(request, name), SAMPLING_OPTIONS[name].high
        if value is None:
            continue
        entries = (value,) if isinstance(value, str) else tuple(value)
        if most is not None and len(entries) > most:
            message = f"{name}: {len(entries)} entries are not allowed; expected at most {most}"
            raise HttpError(400, message, param=name)
        found[name] = entries
    return found


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    for key in given:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise bad("logit_bias", key, "token ids as keys")
    if len(given) > MAX_TOKEN_IDS:
        message = f"logit_bias: {len(given)} entries are not allowed; expected at most {MAX_TOKEN_IDS}"
        raise HttpError(400, message, param="logit_bias")
    return {int(key): bias for key, bias in given.items()}


def num_logprobs(request: GenerationRequest) -> int | None:
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


def _check_best_of(request: GenerationRequest) -> None:
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise bad("best_of", request.best_of, "n, as choosing among more outputs is not supported")


def only_echo(request: GenerationRequest) -> bool:
    """Whether nothing of an output is wanted, only the prompt."""
    return isinstance(request, CompletionRequest) and bool(request.echo) and request.max_tokens == 0


def max_tokens(request: GenerationRequest, model_default: int | None, room: Room, config_default: int) -> int:
    """Of one output. HttpError where there is no room for what was asked for."""
    asked = _asked(request)
    if asked is not None and asked < 1 and not only_echo(request):
        raise bad(_limit(request), asked, "an integer of at least 1" + _with_echo(request))
    _check_room(request, room)
    if asked is not None:
        return max(asked, 1)
    completion = COMPLETION_TOKENS if isinstance(request, CompletionRequest) else None
    return min(most for most in (completion, model_default, config_default, room.left) if most)


def _check_room(request: GenerationRequest, room: Room) -> None:
    """HttpError names the prompt where it leaves no room for an output, else the limit that is too large."""
    asked, least = _asked(request), request.min_tokens or 0
    if room.left < 1:
        field = "prompt" if isinstance(request, CompletionRequest) else "messages"
        message = (
            f"{room.prompt} tokens are not allowed; expected at most {room.most - 1}: {room.bound} has {room.most}"
        )
    elif max(asked or 0, least) > room.left:
        field = _limit(request) if (asked or 0) >= least else "min_tokens"
        message = (
            f"{max(asked or 0, least)} is not allowed; expected at most {room.left}: the prompt has {room.prompt} "
            f"tokens, {room.bound} {room.most}"
        )
    else:
        return
    raise HttpError(400, f"{field}: {message}", param=field, code="context_length_exceeded")


def reserved_tokens(request: GenerationRequest) -> int:
    """For an output, beside a prompt that is cut to what fits."""
    plain = COMPLETION_TOKENS if isinstance(request, CompletionRequest) else 1
    asked = _asked(request)
    return max(plain if asked is None else asked, request.min_tokens or 0, 1)


def _asked(request: GenerationRequest) -> int | None:
    if not isinstance(request, ChatRequest) or request.max_completion_tokens is None:
        return request.max_tokens
    if request.max_tokens not in (None, request.max_completion_tokens):
        raise bad("max_tokens", request.max_tokens, f"max_completion_tokens, {request.max_completion_tokens}")
    return request.max_completion_tokens


def _limit(request: GenerationRequest) -> str:
    """The field that gives the limit."""
    newer = isinstance(request, ChatRequest) and request.max_completion_tokens is not None
    return "max_completion_tokens" if newer else "max_tokens"


def _with_echo(request: GenerationRequest) -> str:
    return ", or 0 with echo" if isinstance(request, CompletionRequest) else ""


def max_nodes(speculation: Speculation, identity: Identity) -> int | None:
    """Of a tree; 0: no speculation, None: as the target does. HttpError for what the target does not do."""
    if speculation.mode not in (None, "off", identity.mode):
        raise bad("speculation.mode", speculation.mode, " or ".join(sorted({"off", identity.mode})))
    nodes = speculation.max_nodes
    if nodes is not None and not 0 <= nodes <= identity.max_nodes:
        raise bad("speculation.max_nodes", nodes, f"an integer 0 to {identity.max_nodes}")
    return 0 if speculation.mode == "off" else nodes


def deadline(asked: float | None, most: float) -> float:
    """Seconds that the request may take."""
    if asked is not None and not 0 < asked <= 1e9:
        raise bad("timeout", asked, "a number of seconds, more than 0")
    return min(asked or most, most)
