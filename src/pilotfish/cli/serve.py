import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from pilotfish import torchless
from pilotfish.cli.cluster import on_cluster
from pilotfish.cli.options import ENGINE, ROWS, JsonOption, engine_config, with_model
from pilotfish.cli.reading import with_defaults
from pilotfish.cli.show import print_json
from pilotfish.cli.vllm_arguments import ServeCommand, with_speculative_config
from pilotfish.command import Given, taking
from pilotfish.config.server import ServerConfig
from pilotfish.errors import InputError, ParameterError
from pilotfish.logs import configure
from pilotfish.options import pick
from pilotfish.prompts import read_chat_template
from pilotfish.server.auth import ENVIRONMENT, Keyring, load_keyring, refuse_open

client = partial(typer.Option, rich_help_panel="Who may come")
fleet = partial(typer.Option, rich_help_panel="Several targets")
log = partial(typer.Option, rich_help_panel="Logs and traces")
API_KEY_HELP = (
    "What clients must show, one or more. Every user of this host can read them in ps: PILOTFISH_API_KEY and "
    "--api-keys keep them out of sight."
)
#: It takes flags of vLLM, too.
COMMAND = ServeCommand
CONFIG_HELP = "TOML of these options by name, as bench tune writes it; options given here go before it."


@taking(ENGINE, ROWS, pick(ServerConfig))
def serve(
    engine: Given,
    rows: Given,
    server: Given,
    model: Annotated[Path | None, typer.Argument(metavar="MODEL", help="The target's directory, as --target.")] = None,
    api_key: Annotated[list[str] | None, typer.Option(metavar="SECRET…", help=API_KEY_HELP)] = None,
    api_keys: Annotated[Path | None, client(help="A file of keys and their limits.")] = None,
    allow_anonymous: Annotated[bool, client("--allow-anonymous", help="Listen beyond this host without keys.")] = False,
    speculative_config: Annotated[
        str | None, typer.Option(rich_help_panel="Speculation", help="vLLM's JSON, where it has a meaning here.")
    ] = None,
    cluster: Annotated[
        Path | None, fleet(metavar="CONFIG.yaml", help="Serve a cluster's targets from this host.")
    ] = None,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager/--no-enforce-eager", hidden=True)] = False,
    log_format: Annotated[str | None, log(help="json or text.", show_default="text on a terminal, else json")] = None,
    log_prompts: Annotated[bool, log("--log-prompts", help="Write prompts into the log.")] = False,
    otlp_traces_endpoint: Annotated[str | None, log(help="URL of an OpenTelemetry collector.")] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", callback=with_defaults, is_eager=True, help=CONFIG_HELP)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Serve OpenAI's API and Anthropic's Messages, metrics, and a page to try it at /. Ends on Ctrl-C or SIGTERM.

    Flags of `vllm serve` are taken, or refused with what there is instead: docs/coming-from-vllm.md. With --json one
    line on stdout says where, once requests can be served."""
    del config_file  # with_defaults has read it
    if cluster is not None and (model is not None or engine.keys() & {"target", "pair"}):
        raise InputError(f"cluster: {cluster} names the model; --target, --pair or MODEL cannot be combined with it")
    config = engine_config(with_speculative_config(with_model(engine, model), speculative_config), **rows)
    torchless.leave_out()
    if "chat_template" in server:
        server["chat_template"] = read_chat_template(server["chat_template"])
    listening = ServerConfig(**server)
    if listening.replicas == 0 and not (listening.target_pool or config.members or cluster):
        raise ParameterError("replicas", 0, "an integer 1 to 64 without --target-pool, --members or --cluster")
    if enforce_eager and config.device != "cpu":
        raise ParameterError("enforce_eager", True, "it on the CPU alone; --eager does without CUDA graphs and kernels")
    keys = _keyring(api_key or (), api_keys, listening.host, anonymous=allow_anonymous)
    from pilotfish.server.application import ServerSetup, traces_url
    from pilotfish.server.main import run_server

    if otlp_traces_endpoint is not None:
        traces_url(otlp_traces_endpoint)
    form = ("text" if sys.stderr.isatty() else "json") if log_format is None else log_format
    configure(form, prompts=log_prompts)
    with nullcontext((config, listening)) if cluster is None else on_cluster(cluster, listening) as (config, listening):
        setup = ServerSetup(config, listening, keys, form, otlp_traces_endpoint)
        run_server(setup, lambda url: print_json({"url": url}) if json else None)


def _keyring(secrets: Sequence[str], file: Path | None, host: str, *, anonymous: bool) -> Keyring:
    """ParameterError without keys where other hosts can reach the server."""
    keys = load_keyring(secrets, os.environ.get(ENVIRONMENT, ""), file)
    if "VLLM_API_KEY" in os.environ and not (keys or anonymous):
        raise InputError(f"VLLM_API_KEY: it is not read; give {ENVIRONMENT}, or --allow-anonymous to do without keys")
    refuse_open(host, keys, anonymous)
    return keys
