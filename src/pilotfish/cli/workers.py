"""`pilotfish draft` and `pilotfish prefill`: pools that listen for targets. `pilotfish target`: the process of a
server's target."""

from __future__ import annotations

import logging
import os
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from pilotfish import pairs
from pilotfish.cli.options import DEFAULT_PAIR, JsonOption, model_directories, model_directory
from pilotfish.cli.show import print_json
from pilotfish.command import Given, taking
from pilotfish.config import POOL_MODEL, PREFILL_ROWS, DraftConfig, EngineConfig, PrefillConfig, config_of
from pilotfish.engine.process import LOG_FORMAT, Signals, run_worker, supervised
from pilotfish.errors import InputError
from pilotfish.logs import configure
from pilotfish.options import pick


@taking(pick(DraftConfig), pick(EngineConfig, *POOL_MODEL))
def draft(
    pool: Given,
    engine: Given,
    draft: Annotated[Path | None, typer.Option(help="The draft's directory in Hugging Face format.")] = None,
    pair: Annotated[str | None, typer.Option(help="The bundled pair whose draft to run: pycode, the default.")] = None,
    log_format: Annotated[
        str | None, typer.Option(envvar=LOG_FORMAT, help="json or text: with times, as a server's lines.")
    ] = None,
    json: JsonOption = False,
    config: Annotated[str | None, typer.Option(hidden=True, help="Of the engine whose draft worker this is.")] = None,
) -> None:
    """Run a draft pool: targets attach to it with --mode async --draft-pool. Ends on Ctrl-C or SIGTERM.

    With --json one line on stdout says where it listens, once it serves."""
    if config is None:
        prepared = DraftConfig(model=EngineConfig(target=_directory(draft, pair), **engine), **pool)
    else:
        parent = config_of(config, EngineConfig)
        prepared = DraftConfig(**{**pool, "model": parent.of_draft, "leaves": parent.leaves})
    level = logging.WARNING if supervised() else logging.INFO  # a worker's parent says what there is to say
    configure(log_format, level=level, process=prepared.name)
    _import_transformers()
    from pilotfish.engine.draft_pool import run_pool

    run_pool(prepared, lambda endpoint: print_json({"endpoint": endpoint}) if json else None)


def _directory(draft: Path | None, pair: str | None) -> Path:
    if draft is not None and pair is not None:
        raise InputError("draft: it cannot be combined with --pair; give one of them")
    if draft is not None:
        return model_directory("draft", draft)
    return pairs.resolve_pair(pair or DEFAULT_PAIR).draft


@taking(pick(PrefillConfig), pick(EngineConfig, *POOL_MODEL, "max_model_len", "max_rows", max_rows=PREFILL_ROWS))
def prefill(
    pool: Given,
    engine: Given,
    target: Annotated[
        Path | None, typer.Option("--target", "--model", help="The targets' model, a directory in Hugging Face format.")
    ] = None,
    pair: Annotated[str | None, typer.Option(help="The bundled pair of the targets: pycode, the default.")] = None,
    log_format: Annotated[
        str | None, typer.Option(envvar=LOG_FORMAT, help="json or text: with times, as a server's lines.")
    ] = None,
    json: JsonOption = False,
    config: Annotated[str | None, typer.Option(hidden=True, help="Of the engine whose prefill worker this is.")] = None,
) -> None:
    """Run a prefill pool, which computes KV of prompts: targets attach to it with --prefill-pool. Ends on Ctrl-C or
    SIGTERM.

    With --json one line on stdout says where it listens, once it serves."""
    if config is None:
        directory = model_directories(pair, target, None)["target"]
        prepared = PrefillConfig(model=EngineConfig(target=directory, **engine), **pool)
    else:
        prepared = PrefillConfig(**{**pool, "model": config_of(config, EngineConfig).of_prefill})
    level = logging.WARNING if supervised() else logging.INFO  # a worker's parent says what there is to say
    configure(log_format, level=level, process=prepared.name)
    _import_transformers()
    from pilotfish.engine.prefill_pool import run_prefill_pool

    run_prefill_pool(prepared, lambda endpoint: print_json({"endpoint": endpoint}) if json else None)


def target(
    listen: Annotated[str, typer.Option(help="Where its server finds it: ipc://PATH.")],
    config: Annotated[str, typer.Option(help="The engine's configuration as JSON, as the server writes it.")],
) -> None:
    """Run a target worker for a server. `pilotfish serve` does so itself."""
    configure("json" if os.environ.get(LOG_FORMAT) == "json" else "text", process="target")
    run_worker("target", lambda signals: _run_target(config_of(config, EngineConfig), listen, signals))


def rank(
    connect: Annotated[Path, typer.Option(help="The socket of the target's process.")],
    rank: Annotated[int, typer.Option(help="Which one: from 1 on.")],
    config: Annotated[str, typer.Option(help="The engine's configuration as JSON.")],
) -> None:
    """Run a rank of a target, which starts it itself."""
    form = "json" if os.environ.get(LOG_FORMAT) == "json" else "text"
    configure(form, level=logging.WARNING, process=f"target rank {rank}")
    _import_transformers()
    from pilotfish.engine.rank import run_rank

    run_rank(config_of(config, EngineConfig), rank, connect)


def _run_target(config: EngineConfig, listen: str, signals: Signals) -> None:
    """Servers hear that it lives, and workers load, while this process imports torch."""
    from pilotfish.engine.host_memory import divided
    from pilotfish.engine.remote_drafts import RemoteDrafts
    from pilotfish.engine.remote_prefills import RemotePrefills
    from pilotfish.engine.servers import Servers
    from pilotfish.wire.serving import WAITING
    from pilotfish.wire.sockets import ListeningChannel

    servers = Servers(ListeningChannel(listen, high_water=WAITING))
    servers.start()
    with closing(servers):
        config = divided(config)
        remote = RemoteDrafts(config) if config.mode == "async" else None
        taken = frozenset[int]() if remote is None else remote.taken
        prefills = RemotePrefills(config, taken) if config.prefills_elsewhere else None
        _import_transformers()
        from pilotfish.engine.target_process import run_target

        run_target(config, servers, signals, remote, prefills)


def _import_transformers() -> None:
    """Import what serving needs of it; its lines go into this process's log."""
    from pilotfish.model.serving_imports import import_for_serving

    import_for_serving()
    from pilotfish.model.metadata import log_through_root

    log_through_root()
