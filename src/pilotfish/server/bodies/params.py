import asyncio
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec

from pilotfish.config.server import MetricsLevel, ServerConfig
from pilotfish.conversation import template_messages, template_tools
from pilotfish.core.sampling.sampling_params import SAMPLING_OPTIONS, SamplingParams
from pilotfish.errors import PromptError
from pilotfish.operate.cascade_policy import CascadeAnswer
from pilotfish.printable import short
from pilotfish.prompts import template_arguments
from pilotfish.server.bodies import requests
from pilotfish.server.bodies.client_texts import ClientTexts
from pilotfish.server.bodies.ignored import Ignored
from pilotfish.server.bodies.reading import SWITCHES, OutputReading
from pilotfish.server.bodies.tools import with_tools_as_text
from pilotfish.server.http_errors import HttpError, bad, bad_request
from pilotfish.server.traffic.rollout import VariantChoice
from pilotfish.wire.serving import Identity

SHORT = 2048  # characters or tokens up to which tokenizing is so fast that the event loop does it itself

Result = TypeVar("Result")
Chat = TypeVar("Chat", bound=requests.ChatRequest)
_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")


@dataclass(frozen=True)
class TokenizedPrompt:
    tokens: list[int]
    text: str | None = None  # where it was given as one


@dataclass(frozen=True)
class Generation:
    body: requests.GenerationRequest
    head: dict[str, Any]  # the first fields of the answer
    target: Identity
    prompts: tuple[TokenizedPrompt, ...]
    params: SamplingParams  # of each prompt
    reading: OutputReading
    choice: VariantChoice  # how the server speculates for it
    script: str  # of its prompt
    cache_salt: str | None
    session: str | None  # equal for requests that belong together
    timeout: float  # seconds
    metrics: MetricsLevel
    cascade: CascadeAnswer | None = None  # for a cascade's alias: which model answers


def sampling_params(
    body: requests.GenerationRequest,
    reading: OutputReading,
    defaults: Mapping[str, Any],
    prompt: int,
    target: Identity,
    config: ServerConfig,
) -> SamplingParams:
    """`prompt`: tokens of the longest prompt. HttpError or ParameterError names the first bad field."""
    given = {name: getattr(body, name) for name in requests.SAMPLING}
    values = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    _check_lengths(given)
    values["seed"] = _seed(body.seed)
    values["logit_bias"] = _logit_bias(body.logit_bias or {})
    values["structured_outputs"] = reading.constraint
    values["skip_special_tokens"] = values.get("skip_special_tokens", True) and not reading.shows_special
    values["logprobs"] = logprobs = body.num_logprobs
    if isinstance(body, requests.CompletionRequest) and body.echo and logprobs is not None:
        values["prompt_logprobs"] = max(logprobs, body.prompt_logprobs or 0)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad("best_of", body.best_of, "n, as choosing among more outputs is not supported")
    if body.n is not None and not 1 <= body.n <= config.max_n:
        raise bad("n", body.n, f"an integer 1 to {config.max_n}")
    left = _room(body, prompt, target)
    limits = (body.default_tokens, defaults.get("max_tokens"), config.default_max_tokens, left)
    asked = body.limit[1]
    values["max_tokens"] = min(filter(None, limits)) if asked is None else max(min(asked, left), 1)
    return SamplingParams(**values)


def _check_lengths(given: Mapping[str, Any]) -> None:
    """Checked here because SamplingParams' own errors would quote all entries."""
    for name, value in given.items():
        most = SAMPLING_OPTIONS[name].high
        if isinstance(value, list | dict) and most is not None and len(value) > most:
            raise bad_request(name, f"{len(value)} entries are not allowed; expected at most {most}")


def _seed(given: int | str | None) -> int | None:
    """Clients whose JSON knows no integers above 2**53 send digits as text. -1 means none, as in vLLM."""
    if not isinstance(given, str):
        return None if given == -1 else given
    if not (given.isascii() and given.isdecimal() and len(given) <= 20):
        raise bad("seed", given, requests.SEED)
    return int(given)


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    for key in given:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise bad("logit_bias", key, "token ids as keys")
    return {int(key): bias for key, bias in given.items()}


def _room(body: requests.GenerationRequest, prompt: int, target: Identity) -> int:
    """Tokens left for an output. HttpError names the prompt if there are none, else the limit that is too large."""
    (field, asked), least, most = body.limit, body.min_tokens or 0, target.longest
    if asked is not None and asked < 1 and not body.only_echo:
        with_echo = ", or 0 with echo" if body.output == "completion" else ""
        raise bad(field, asked, f"an integer of at least 1{with_echo}")
    bound, left = "the context" if target.longest == target.context else "the target's KV pool", most - prompt
    if left < 1:
        problem = f"{prompt} tokens are not allowed; expected at most {most - 1}: {bound} has {most}"
        raise bad_request(body.prompt_field, problem, "context_length_exceeded")
    longest = 0 if body.clipped else asked or 0
    if (wanted := max(longest, least)) > left:
        problem = f"{wanted} is not allowed; expected at most {left}: the prompt has {prompt} tokens, {bound} {most}"
        raise bad_request(field if longest >= least else "min_tokens", problem, "context_length_exceeded")
    return left


def max_nodes(speculation: requests.SpeculationOptions, target: Identity, ignored: Ignored) -> int | None:
    nodes, allowed = speculation.max_nodes, f"an integer 0 to {target.max_nodes}"
    if nodes is not None and nodes < 0:
        raise bad("speculation.max_nodes", nodes, allowed)
    given = granted(speculation, target)
    if "mode" in given:
        ignored.leave_out(bad("speculation.mode", speculation.mode, " or ".join(sorted({"off", target.mode}))))
    if "max_nodes" in given:
        ignored.leave_out(bad("speculation.max_nodes", nodes, allowed))
    return 0 if speculation.mode == "off" else given.get("max_nodes", nodes)


def granted(speculation: requests.SpeculationOptions, target: Identity) -> dict[str, Any]:
    more = (speculation.max_nodes or 0) > target.max_nodes
    other = speculation.mode not in (None, "off", target.mode)
    return {**({"mode": target.mode} if other else {}), **({"max_nodes": target.max_nodes} if more else {})}


async def text_tokens(text: str, texts: ClientTexts, *, special: bool = True) -> list[int]:
    return await _tokenize(len(text), lambda: texts.tokens(text, special=special))


async def tokens_text(tokens: list[int], tokenizer: Any) -> str:
    return await _tokenize(len(tokens), lambda: cast(str, tokenizer.decode(tokens)))


async def _tokenize(size: int, work: Callable[[], Result]) -> Result:
    if size <= SHORT:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_thread, work)


async def chat_tokens(
    request: requests.ChatRequest | requests.TokenizeRequest, texts: ClientTexts, *, tools_as_text: bool
) -> list[int]:
    """HttpError or ParameterError names the bad field, HttpError where the template refuses the messages."""
    tokenizer, plain = texts.tokenizer, template_messages("messages", request.messages or [])
    begins, goes_on = request.add_generation_prompt, bool(request.continue_final_message)
    own = template_arguments(tokenizer, request.chat_template_kwargs or {}, begins=begins, goes_on=goes_on)
    arguments = {**own, **template_tools(request.tools)}
    if tools_as_text:
        plain = with_tools_as_text(plain, arguments.pop("tools", []))
    special = request.add_special_tokens is True
    size = sum(len(text) for text in chat_texts(request))
    try:
        return await _tokenize(size, lambda: texts.chat(plain, arguments, special=special))
    except PromptError as error:
        raise HttpError(400, str(error), param="messages") from error


def chat_texts(request: requests.ChatRequest | requests.TokenizeRequest) -> Iterator[str]:
    for message in request.messages or ():
        yield from message.texts
    if request.tools:
        yield msgspec.json.encode(request.tools).decode()


def with_effort(request: Chat, tokenizer: Any, ignored: Ignored) -> Chat:
    effort, told = request.reasoning_effort, dict[str, Any]()
    if effort is not None and "reasoning_effort" in (tokenizer.chat_template or ""):
        told = {"reasoning_effort": effort}
    elif effort == "none":
        told = dict.fromkeys(SWITCHES, False)
    elif effort not in (None, "medium"):
        problem = f"{short(effort)} is not supported with this model; expected none or medium"
        ignored.leave_out(bad_request(request.effort_field, problem, "unsupported_parameter"))
    own = request.chat_template_kwargs or {}
    return msgspec.structs.replace(request, chat_template_kwargs={**told, **own}) if told else request


async def completion_prompts(
    request: requests.CompletionRequest, texts: ClientTexts, most: int
) -> list[TokenizedPrompt]:
    given = request.prompts
    if not 0 < len(given) <= most:
        raise bad_request("prompt", f"{len(given)} prompts are not allowed; expected 1 to {most}")
    special = request.add_special_tokens is not False
    return [await _prompt(one, texts, special=special) for one in given]


async def _prompt(given: str | list[int], texts: ClientTexts, *, special: bool) -> TokenizedPrompt:
    text = given if isinstance(given, str) else None
    tokens = given if not isinstance(given, str) else await text_tokens(given, texts, special=special)
    if not tokens:
        raise bad("prompt", given, "at least one token")
    if text is None:
        check_token_ids("prompt", tokens, texts.tokenizer)
    return TokenizedPrompt(tokens, text)


def check_token_ids(field: str, tokens: list[int], tokenizer: Any) -> None:
    size = len(tokenizer)
    for token in tokens:
        if not 0 <= token < size:
            raise bad(field, token, f"token ids 0 to {size - 1}")


def kept(prompts: list[TokenizedPrompt], body: requests.GenerationRequest, most: int) -> tuple[TokenizedPrompt, ...]:
    """Parts of the prompts: as many tokens as the body says, or as fit beside the output into `most`."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return tuple(prompts)
    if keep < 1 and keep != -1:
        raise bad("truncate_prompt_tokens", keep, "-1, or an integer of at least 1")
    if keep == -1:
        asked = body.limit[1]
        output = max((body.default_tokens or 1) if asked is None else asked, body.min_tokens or 0, 1)
        keep = max(1, most - output)
    part = slice(keep) if body.truncation_side == "right" else slice(-keep, None)
    return tuple(p if len(p.tokens) <= keep else TokenizedPrompt(p.tokens[part]) for p in prompts)
