from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pilotfish.config.fields import ADDRESSES, KEYS, Texts, limit
from pilotfish.core.sampling.sampling_params import MAX_SAMPLES, MAX_TOKENS
from pilotfish.errors import ParameterError
from pilotfish.grammar.parsers.formats import TOOL_FORMATS
from pilotfish.grammar.parsers.reasoning import REASONING_FORMATS
from pilotfish.options import check_options, option, refuse_unknown

MetricsLevel = Literal["none", "summary", "detailed"]
GenerationDefaults = Literal["auto", "vllm"]
#: How a chat's tools reach the model: by its chat template, or as plain text where that knows no tools.
ToolTemplate = Literal["model", "default"]
#: Seconds of silence that a busy machine may cause; a target speaks twice in each.
MIN_TARGET_TIMEOUT = 2.0

SPECIAL_IN_USER_TEXT = "--special-in-user-text/--no-special-in-user-text"

#: Groups of options in the help of commands.
fleet = partial(option, panel="Several targets")
timeout = partial(option, panel="How long", above=0, high=86400, unit="seconds")
answer = partial(option, panel="What answers are by default")
captured = partial(option, panel="What is kept of requests")


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The server serves targets of one model over HTTP: `replicas` that it starts, or those at `target_pool`. If a
    target ends, its requests go on at another one, for which they wait at most `resume_timeout`.

    `served_model_name` replaces the model's own name. A request's head, and then its body, must be complete after
    `read_timeout`. `metrics` is the least that answers say of their speculation."""

    host: Annotated[str, option("Address to listen at.")] = "127.0.0.1"
    port: Annotated[int, option("0: any that is free.", 0, 65535)] = 8000
    served_model_name: Annotated[Texts, option("What clients call the model. One name or more.", metavar="NAME…")] = ()
    replicas: (
        Annotated[int, fleet("Targets to start here, which divide what there is; 1 if none are elsewhere.", 0, 64)]
        | None
    ) = None
    target_pool: Annotated[Texts, fleet("Targets elsewhere instead: ipc://… or tcp://…, joined by ,", **ADDRESSES)] = ()
    target_key: Annotated[Path, fleet("This server's key file, for targets with keys.")] | None = None
    target_pool_key: Annotated[Texts, fleet("The targets' public keys, joined by a space.", **KEYS)] = ()
    resume_timeout: Annotated[float, timeout("Seconds that a request waits for another target.")] = 30.0
    max_body_bytes: Annotated[int, limit("Of a request.", 1024, 1 << 30)] = 4 << 20
    max_prompts: Annotated[int, limit("Of a request.", 1, 1 << 12)] = 64
    max_n: Annotated[int, limit("Outputs of a prompt.", 1, MAX_SAMPLES)] = 16
    max_queued_requests: Annotated[int, limit("Sequences that may wait beyond those that run.", 0, 1 << 20)] = 256
    max_queued_tokens: Annotated[int, limit("Tokens of them; 0: four times the KV pool.", 0, 1 << 40)] = 0
    read_timeout: Annotated[float, timeout("Seconds that a client has to send a request.")] = 30.0
    request_timeout: Annotated[float, timeout("Seconds that a request may take.")] = 600.0
    write_timeout: Annotated[float, timeout("Seconds that a reader may take nothing.")] = 30.0
    drain_timeout: Annotated[float, timeout("Seconds that requests have to end after SIGTERM.")] = 30.0
    target_timeout: Annotated[
        float, timeout("Seconds of silence after which a target is killed.", MIN_TARGET_TIMEOUT, above=None)
    ] = 30.0
    chat_template: (
        Annotated[str, answer("A Jinja template, or its text; in place of the model's own.", metavar="FILE")] | None
    ) = None
    tool_call_parser: Annotated[
        str, answer("How calls of tools are written: auto, none, or of docs/tool-calls.md.", metavar="FORMAT")
    ] = "auto"
    reasoning_parser: Annotated[
        str, answer("How reasoning is marked: auto, none, or of docs/tool-calls.md.", metavar="FORMAT")
    ] = "auto"
    tool_template: Annotated[
        ToolTemplate,
        answer("default: a plain text tells of tools, and of their calls, where the model's template does not."),
    ] = "model"
    strict: Annotated[bool, answer("Refuse fields of requests that would be left out: docs/agents.md.")] = False
    special_in_user_text: Annotated[
        bool, answer("Texts of clients may spell special tokens: docs/security.md.", names=(SPECIAL_IN_USER_TEXT,))
    ] = True
    generation_config: Annotated[
        GenerationDefaults, answer("auto: sampling defaults of the model's generation_config.json; vllm: none of them.")
    ] = "auto"
    default_max_tokens: Annotated[int, answer("0: what the context leaves.", 0, MAX_TOKENS)] = 0
    rollout: Annotated[Path, answer("A TOML file of variants of speculation, of docs/rollout.md.")] | None = None
    cascade: (
        Annotated[Path, answer("A TOML file of a smaller model that answers what it is sure of: docs/cascade.md.")]
        | None
    ) = None
    capture: (
        Annotated[Path, captured("A folder that keeps token ids of requests that allow it: docs/redistil.md.")] | None
    ) = None
    capture_tags: Annotated[Texts, captured("Tags that allow it, joined by ,; else keys do.", **ADDRESSES)] = ()
    capture_days: Annotated[int, captured("How long they are kept.", 1, 3650)] = 7
    capture_size: Annotated[float, captured("Of them all, at most.", 0.1, 1 << 20, unit="GiB")] = 1.0
    metrics: Annotated[
        MetricsLevel, answer("none, summary or detailed.", names=("--per-request-spec-decode-metrics",))
    ] = "none"

    def __post_init__(self) -> None:
        check_options(self)
        if not self.host:
            raise ParameterError("host", self.host, "a host name or address")
        _check_format("tool_call_parser", self.tool_call_parser, TOOL_FORMATS)
        _check_format("reasoning_parser", self.reasoning_parser, REASONING_FORMATS)
        if self.capture_tags and self.capture is None:
            raise ParameterError("capture_tags", ",".join(self.capture_tags), "none without capture")
        if len(set(self.target_pool)) < len(self.target_pool):
            raise ParameterError("target_pool", ",".join(self.target_pool), "each target once")
        if not all(self.served_model_name):
            raise ParameterError("served_model_name", self.served_model_name, "names of at least one character")


def _check_format(field: str, name: str, known: Collection[str]) -> None:
    if name not in ("auto", "none", *known):
        raise ParameterError(field, name, f"auto, none, {' or '.join(known)}")
