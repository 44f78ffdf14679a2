"""`pilotfish serve`: OpenAI's API over a target and its drafts."""

from __future__ import annotations

import json as json_text
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, cast

import typer

from pilotfish.cli.options import EngineOptions, JsonOption
from pilotfish.cli.speculative_config import with_speculative_config
from pilotfish.command import taking
from pilotfish.config import EngineConfig, MetricsLevel, ServerConfig
from pilotfish.errors import ParameterError


@dataclass(frozen=True)
class ServerOptions:
    """Where to listen, whom to serve, and how much of it."""

    host: Annotated[str, typer.Option(help="Address to listen at.")] = ServerConfig.host
    port: Annotated[int, typer.Option(help="0: any that is free.")] = ServerConfig.port
    served_model_name: Annotated[list[str] | None, typer.Option(help="What clients call the model. Repeatable.")] = None
    max_requests: Annotated[int, typer.Option(help="Sequences that run at a time.")] = EngineConfig.max_requests
    max_body_bytes: Annotated[int, typer.Option(help="Of a request.")] = ServerConfig.max_body_bytes
    max_prompts: Annotated[int, typer.Option(help="Of a request.")] = ServerConfig.max_prompts
    max_n: Annotated[int, typer.Option(help="Outputs of a prompt.")] = ServerConfig.max_n
    default_max_tokens: Annotated[int, typer.Option(help="0: what the context leaves.")] = (
        ServerConfig.default_max_tokens
    )
    read_timeout: Annotated[float, typer.Option(help="Seconds that a client has to send a request.")] = (
        ServerConfig.read_timeout
    )
    request_timeout: Annotated[float, typer.Option(help="Seconds that a request may take.")] = (
        ServerConfig.request_timeout
    )
    write_timeout: Annotated[float, typer.Option(help="Seconds that a reader may take nothing.")] = (
        ServerConfig.write_timeout
    )
    drain_timeout: Annotated[float, typer.Option(help="Seconds that requests have to end after SIGTERM.")] = (
        ServerConfig.drain_timeout
    )
    target_timeout: Annotated[float, typer.Option(help="Seconds of silence after which a target is killed.")] = (
        ServerConfig.target_timeout
    )
    max_queued_requests: Annotated[int, typer.Option(help="Sequences that may wait beyond those that run.")] = 256
    max_queued_tokens: Annotated[int, typer.Option(help="Tokens of them; 0: four times the KV pool.")] = 0
    api_key: Annotated[list[str] | None, typer.Option(help="A secret that clients show. Repeatable.")] = None
    api_keys: Annotated[Path | None, typer.Option(help="A file of keys and their limits.")] = None
    allow_anonymous: Annotated[
        bool, typer.Option("--allow-anonymous", help="Listen beyond this host without keys.")
    ] = False
    per_request_spec_decode_metrics: Annotated[str, typer.Option(help="none, summary or detailed.")] = (
        ServerConfig.metrics
    )
    speculative_config: Annotated[str | None, typer.Option(help="vLLM's JSON, where it has a meaning here.")] = None
    log_format: Annotated[str | None, typer.Option(help="json or text.  [default: text on a terminal]")] = None
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts into the log.")] = False
    otlp_traces_endpoint: Annotated[str | None, typer.Option(help="URL of an OpenTelemetry collector.")] = None

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
        )


@taking(EngineOptions, ServerOptions)
def serve(engine: EngineOptions, server: ServerOptions, json: JsonOption = False) -> None:
    """Serve OpenAI's API: completions, chats, metrics, and a page to try it at /. Ends on Ctrl-C or SIGTERM.

    With --json one line on stdout says where, once requests can be served."""
    options = with_speculative_config(engine, server.speculative_config)
    config = replace(options.config(concurrency=1), max_requests=server.max_requests)
    listening = server.config()
    if server.log_format not in (None, "json", "text"):
        raise ParameterError("log_format", server.log_format, "json or text")
    from pilotfish.server.admission import Limits
    from pilotfish.server.keys import ENVIRONMENT, load_keyring, refuse_open
    from pilotfish.server.logs import LogFormat, configure
    from pilotfish.server.tracing import traces_url

    keys = load_keyring(server.api_key or (), os.environ.get(ENVIRONMENT, ""), server.api_keys)
    refuse_open(listening.host, keys, server.allow_anonymous)
    limits = Limits(max_queued_requests=server.max_queued_requests, max_queued_tokens=server.max_queued_tokens)
    if server.otlp_traces_endpoint is not None:
        traces_url(server.otlp_traces_endpoint)
    _leave_out_torch()
    from pilotfish.server.run import Setup, run_server

    form = cast(LogFormat, server.log_format or ("text" if sys.stderr.isatty() else "json"))
    configure(form, prompts=server.log_prompts)
    setup = Setup(config, listening, keys, limits, form, server.otlp_traces_endpoint)
    run_server(setup, _tell if json else lambda _: None)


def _leave_out_torch() -> None:
    """This process computes nothing: transformers, which has a mode without torch, then starts in a third of the time
    and takes 300 MB less."""
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # whoever imports it is told that there is none
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that no models can be loaded


def _tell(url: str) -> None:
    sys.stdout.write(json_text.dumps({"url": url}) + "\n")
    sys.stdout.flush()
