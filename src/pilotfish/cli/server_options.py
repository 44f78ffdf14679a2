"""Options of `pilotfish serve`, beside the engine's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, cast

import typer

from pilotfish.cli.chat_template import read_chat_template
from pilotfish.cli.options import count, machine, speculation
from pilotfish.config import EngineConfig, GenerationDefaults, MetricsLevel, ServerConfig

limit = partial(typer.Option, rich_help_panel="How much at a time")
timeout = partial(typer.Option, rich_help_panel="How long")
client = partial(typer.Option, rich_help_panel="Who may come")
answer = partial(typer.Option, rich_help_panel="What answers are by default")
log = partial(typer.Option, rich_help_panel="Logs and traces")


@dataclass(frozen=True)
class ServerOptions:
    """Where to listen, whom to serve, and how much of it."""

    host: Annotated[str, typer.Option(help="Address to listen at.")] = ServerConfig.host
    port: Annotated[int, typer.Option(help="0: any that is free.")] = ServerConfig.port
    served_model_name: Annotated[
        list[str] | None, typer.Option(metavar="NAME…", help="What clients call the model. One name or more.")
    ] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SECRET…",
            help="What clients must show, one or more. Every user of this host can read them in ps: PILOTFISH_API_KEY "
            "and --api-keys keep them out of sight.",
        ),
    ] = None
    max_requests: Annotated[int, limit("--max-requests", "--max-num-seqs", help="Sequences that run at a time.")] = (
        EngineConfig.max_requests
    )
    max_rows: Annotated[
        str,
        limit("--max-rows", "--max-num-batched-tokens", metavar="TOKENS", help="Of a forward, guesses included."),
    ] = str(EngineConfig.max_rows)
    max_queued_requests: Annotated[int, limit(help="Sequences that may wait beyond those that run.")] = 256
    max_queued_tokens: Annotated[int, limit(help="Tokens of them; 0: four times the KV pool.")] = 0
    max_body_bytes: Annotated[int, limit(help="Of a request.")] = ServerConfig.max_body_bytes
    max_prompts: Annotated[int, limit(help="Of a request.")] = ServerConfig.max_prompts
    max_n: Annotated[int, limit(help="Outputs of a prompt.")] = ServerConfig.max_n
    read_timeout: Annotated[float, timeout(help="Seconds that a client has to send a request.")] = (
        ServerConfig.read_timeout
    )
    request_timeout: Annotated[float, timeout(help="Seconds that a request may take.")] = ServerConfig.request_timeout
    write_timeout: Annotated[float, timeout(help="Seconds that a reader may take nothing.")] = (
        ServerConfig.write_timeout
    )
    drain_timeout: Annotated[float, timeout(help="Seconds that requests have to end after SIGTERM.")] = (
        ServerConfig.drain_timeout
    )
    target_timeout: Annotated[float, timeout(help="Seconds of silence after which a target is killed.")] = (
        ServerConfig.target_timeout
    )
    api_keys: Annotated[Path | None, client(help="A file of keys and their limits.")] = None
    allow_anonymous: Annotated[bool, client("--allow-anonymous", help="Listen beyond this host without keys.")] = False
    chat_template: Annotated[
        str | None, answer(metavar="FILE", help="A Jinja template, or its text; in place of the model's own.")
    ] = None
    generation_config: Annotated[
        str, answer(help="auto: sampling defaults of the model's generation_config.json; vllm: none of them.")
    ] = ServerConfig.generation_config
    default_max_tokens: Annotated[int, answer(help="0: what the context leaves.")] = ServerConfig.default_max_tokens
    per_request_spec_decode_metrics: Annotated[str, answer(help="none, summary or detailed.")] = ServerConfig.metrics
    speculative_config: Annotated[str | None, speculation(help="vLLM's JSON, where it has a meaning here.")] = None
    enforce_eager: Annotated[bool, machine("--enforce-eager/--no-enforce-eager", hidden=True)] = False
    log_format: Annotated[str | None, log(help="json or text.", show_default="text on a terminal, else json")] = None
    log_prompts: Annotated[bool, log("--log-prompts", help="Write prompts into the log.")] = False
    otlp_traces_endpoint: Annotated[str | None, log(help="URL of an OpenTelemetry collector.")] = None

    def config(self) -> ServerConfig:
        return ServerConfig(
            host=self.host,
            port=self.port,
            served_model_name=tuple(self.served_model_name or ()),
            max_body_bytes=self.max_body_bytes,
            max_prompts=self.max_prompts,
            max_n=self.max_n,
            default_max_tokens=self.default_max_tokens,
            read_timeout=self.read_timeout,
            request_timeout=self.request_timeout,
            write_timeout=self.write_timeout,
            drain_timeout=self.drain_timeout,
            target_timeout=self.target_timeout,
            metrics=cast(MetricsLevel, self.per_request_spec_decode_metrics),
            chat_template=None if self.chat_template is None else read_chat_template(self.chat_template),
            generation_config=cast(GenerationDefaults, self.generation_config),
        )

    @property
    def rows(self) -> int:
        """Of a forward."""
        return count("max_rows", self.max_rows)
