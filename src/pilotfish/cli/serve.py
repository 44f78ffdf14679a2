"""`pilotfish serve`: OpenAI's API over a target and its drafts."""

from __future__ import annotations

import json as json_text
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast

import typer

from pilotfish.cli.options import EngineOptions, JsonOption
from pilotfish.cli.server_options import ServerOptions
from pilotfish.cli.speculative_config import with_speculative_config
from pilotfish.command import taking
from pilotfish.errors import InputError, ParameterError


@taking(EngineOptions, ServerOptions)
def serve(
    engine: EngineOptions,
    server: ServerOptions,
    model: Annotated[Path | None, typer.Argument(metavar="MODEL", help="The target's directory, as --target.")] = None,
    json: JsonOption = False,
) -> None:
    """Serve OpenAI's API: completions, chats, metrics, and a page to try it at /. Ends on Ctrl-C or SIGTERM.

    Flags of `vllm serve` are taken, or refused with what there is instead: docs/coming-from-vllm.md. With --json one
    line on stdout says where, once requests can be served."""
    options = with_speculative_config(_with_model(engine, model), server.speculative_config)
    config = replace(options.config(concurrency=1), max_requests=server.max_requests, max_rows=server.rows)
    listening = server.config()
    if server.log_format not in (None, "json", "text"):
        raise ParameterError("log_format", server.log_format, "json or text")
    if server.enforce_eager and config.device != "cpu":
        raise ParameterError("enforce_eager", True, "it on the CPU alone; --eager does without CUDA graphs and kernels")
    from pilotfish.server.auth import ENVIRONMENT, load_keyring, refuse_open
    from pilotfish.server.limits import QueueLimits
    from pilotfish.server.logs import LogFormat, configure

    keys = load_keyring(server.api_key or (), os.environ.get(ENVIRONMENT, ""), server.api_keys)
    if "VLLM_API_KEY" in os.environ and not (keys or server.allow_anonymous):
        raise InputError(f"VLLM_API_KEY: it is not read; give {ENVIRONMENT}, or --allow-anonymous to do without keys")
    refuse_open(listening.host, keys, server.allow_anonymous)
    limits = QueueLimits(max_queued_requests=server.max_queued_requests, max_queued_tokens=server.max_queued_tokens)
    _leave_out_torch()
    from pilotfish.server.main import ServerSetup, run_server, traces_url

    if server.otlp_traces_endpoint is not None:
        traces_url(server.otlp_traces_endpoint)
    form = cast(LogFormat, server.log_format or ("text" if sys.stderr.isatty() else "json"))
    configure(form, prompts=server.log_prompts)
    setup = ServerSetup(config, listening, keys, limits, form, server.otlp_traces_endpoint)
    run_server(setup, _tell if json else lambda _: None)


def _with_model(options: EngineOptions, model: Path | None) -> EngineOptions:
    if model is None:
        return options
    if options.target is not None:
        raise InputError(f"target: {str(options.target)!r} cannot be combined with MODEL; give one of them")
    return replace(options, target=model)


def _leave_out_torch() -> None:
    """This process computes nothing: transformers, which has a mode without torch, then starts in a third of the time
    and takes 300 MB less."""
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # whoever imports it is told that there is none
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that no models can be loaded


def _tell(url: str) -> None:
    sys.stdout.write(json_text.dumps({"url": url}) + "\n")
    sys.stdout.flush()
