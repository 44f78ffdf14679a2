"""Options of `pilotfish bench serve`. Quick to import."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pilotfish.core.sampling.sampling_params import MAX_TOKENS
from pilotfish.options import option

MANY = 1 << 20
MOST_MS = 1e7


@dataclass(frozen=True, kw_only=True)
class ServeBenchOptions:
    """What is sent where, when, and what is made of the answers. Lists in texts are separated by commas."""

    json: Annotated[bool, option("JSON on stdout and nothing else.")] = False
    out: Annotated[Path, option("Write the JSON to this file as well.")] | None = None
    base_url: Annotated[str, option("Of the server: http:// or https://, with /v1 or without.", metavar="URL")]
    model: Annotated[str, option("The model to ask for.  [default: the first that the server lists]")] = ""
    api_key_env: Annotated[str, option("Environment variable that holds the server's API key.", metavar="NAME")] = ""
    endpoint: Annotated[Literal["chat", "completions"], option("/v1/chat/completions or /v1/completions.")] = "chat"
    label: Annotated[str, option("Name of this run in reports.  [default: the model]")] = ""
    workload: Annotated[
        str, option("code, chat, sessions, agents, long, summary, json; or a mix of them by weight: chat:3,agents:1.")
    ] = "chat"
    prompts: Annotated[Path, option("A prompt file, instead of a workload.")] | None = None
    trace: Annotated[Path, option("A trace in Mooncake's format, .gz or not, instead of a workload.")] | None = None
    requests: Annotated[int, option("Of each load; sessions begin until their turns are so many.", 1, MANY)] = 100
    warmup: Annotated[int, option("Requests before those that count.", 0, MANY)] = 2
    concurrencies: Annotated[
        str, option("Closed loop: sessions at a time, one load after another.  [default: 1]", names=("--concurrency",))
    ] = ""
    rates: Annotated[
        str, option("Open loop: sessions that begin a second, one load after the other.", names=("--rate",))
    ] = ""
    burstiness: Annotated[
        float, option("Of --rate: gamma shape of the intervals; 1: Poisson, less: bursts.", 0.01, 100.0)
    ] = 1.0
    burst_on: Annotated[float, option("Seconds in which sessions begin, between pauses; 0: always.", 0.0, 1e6)] = 0.0
    burst_off: Annotated[float, option("Seconds of such pauses; --rate stays the mean.", 0.0, 1e6)] = 0.0
    speedup: Annotated[float, option("A trace's times are divided by it.", 1e-3, 1e6)] = 1.0
    block_tokens: Annotated[int, option("Tokens of text for each 512 of a trace's prompts and answers.", 1, 4096)] = 512
    prompt_tokens: Annotated[int, option("Of a first prompt, about.  [default: the workload's]", 1, MANY)] | None = None
    answer_tokens: Annotated[int, option("max_tokens.  [default: the workload's]", 1, MAX_TOKENS)] | None = None
    turns: Annotated[int, option("Of a session or an agent's task.  [default: the workload's]", 1, 1000)] | None = None
    spread: Annotated[float, option("Lengths vary by up to this share, evenly.", 0.0, 1.0)] = 0.3
    temperature: Annotated[float, option("Sampling temperature.", 0.0, 2.0)] = 0.0
    seed: Annotated[int, option("Of texts, of arrivals and of the requests' own seeds.", 0, 1 << 31)] = 0
    ignore_eos: Annotated[bool, option("Answers have all their tokens; a server must know the field.")] = False
    tokenizer: Annotated[
        str,
        option(
            "A tokenizer.json that counts texts' lengths instead of the bundled pair's, and answers' tokens where the "
            "server tells none.",
            metavar="FILE",
        ),
    ] = ""
    timeout: Annotated[float, option("Seconds after which a request has failed.", 0.1, 1e6)] = 600.0
    devices: Annotated[int, option("Devices that serve, for figures of each.", 1, MANY)] = 1
    ttft_limit_ms: Annotated[float, option("Goodput: time to the first token.", 0.001, MOST_MS)] | None = None
    tpot_limit_ms: Annotated[float, option("Goodput: time per output token.", 0.001, MOST_MS)] | None = None
    e2e_limit_ms: Annotated[float, option("Goodput: time to the end.", 0.001, MOST_MS)] | None = None
