import logging
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from pilotfish.cli.options import ENGINE, ROWS, engine_config, model_directories
from pilotfish.cli.show import print_json
from pilotfish.command import Given, taking
from pilotfish.config.engine import PREFILL_ROWS, EngineConfig
from pilotfish.config.text import config_of
from pilotfish.config.workers import GGUF, OF_PREFILLS, POOL_MODEL, DraftConfig, PrefillConfig, TargetConfig
from pilotfish.engine.pairs.directories import model_directory
from pilotfish.engine.processes.process import LOG_FORMAT, Signals, run_worker, supervised
from pilotfish.logs import configure
from pilotfish.options import pick

logger = logging.getLogger(__name__)

LogFormatOption = Annotated[
    str | None, typer.Option(envvar=LOG_FORMAT, help="json or text: with times, as a server's lines.")
]
EndpointOption = Annotated[bool, typer.Option("--json", help="Say where it listens on stdout, once it serves.")]
ParentOption = Annotated[str | None, typer.Option(hidden=True, help="Of the engine that starts this process, as JSON.")]


@taking(pick(DraftConfig), pick(EngineConfig, *POOL_MODEL))
def draft(
    pool: Given,
    engine: Given,
    draft: Annotated[
        Path | None,
        typer.Option(
            "--draft", "--model", help="The draft's directory, or GGUF file; with --pair one of its drafts, by name."
        ),
    ] = None,
    pair: Annotated[str | None, typer.Option(help="The bundled pair whose draft to run: pycode, the default.")] = None,
    log_format: LogFormatOption = None,
    json: EndpointOption = False,
    config: ParentOption = None,
) -> None:
    """Run a draft pool: targets attach to it with --mode async --draft-pool. Ends on Ctrl-C or SIGTERM."""
    if config is None:
        prepared = _configuration(draft, pair, pool, engine)
    else:
        parent = config_of(config, EngineConfig)
        own = {"model": parent.of_draft, "leaves": parent.leaves}
        if parent.features == parent.draft:
            own["target"] = parent.target
        prepared = DraftConfig(**{**pool, **own})
    _prepare_pool(prepared.name, log_format)
    from pilotfish.engine.drafts.draft_pool import run_pool

    run_pool(prepared, _shown(json=json))


def _configuration(draft: Path | None, pair: str | None, pool: Given, engine: Given) -> DraftConfig:
    if draft is not None and pair is None:
        as_it_is = draft.suffix == GGUF and draft.is_file() and pool.get("backend", "pilotfish") != "pilotfish"
        found = draft if as_it_is else model_directory("draft", draft)
        return DraftConfig(model=EngineConfig(target=found, **engine), **pool)
    from pilotfish.model.heads.weights import is_head

    models = model_directories(pair, None, draft)
    target = {"target": models["target"]} if is_head(models["draft"]) else {}
    return DraftConfig(model=EngineConfig(target=models["draft"], **engine), **{**target, **pool})


@taking(pick(PrefillConfig), pick(EngineConfig, *POOL_MODEL, *OF_PREFILLS, max_rows=PREFILL_ROWS))
def prefill(
    pool: Given,
    engine: Given,
    target: Annotated[
        Path | None, typer.Option("--target", "--model", help="The targets' model, a directory in Hugging Face format.")
    ] = None,
    pair: Annotated[str | None, typer.Option(help="The bundled pair of the targets: pycode, the default.")] = None,
    log_format: LogFormatOption = None,
    json: EndpointOption = False,
    config: ParentOption = None,
) -> None:
    """Run a pool that computes KV of prompts: targets attach to it with --prefill-pool. Ends on Ctrl-C or SIGTERM."""
    if config is None:
        directory = model_directories(pair, target, None)["target"]
        prepared = PrefillConfig(model=EngineConfig(target=directory, **engine), **pool)
    else:
        prepared = PrefillConfig(**{**pool, "model": config_of(config, EngineConfig).of_prefill})
    _prepare_pool(prepared.name, log_format)
    from pilotfish.engine.prefills.prefill_pool import run_prefill_pool

    run_prefill_pool(prepared, _shown(json=json))


@taking(pick(TargetConfig), ENGINE, ROWS)
def target(
    own: Given,
    engine: Given,
    rows: Given,
    log_format: LogFormatOption = None,
    json: EndpointOption = False,
    config: ParentOption = None,
) -> None:
    """Run a target: servers attach to it with --target-pool. Ends on Ctrl-C or SIGTERM."""
    served = engine_config(engine, **rows) if config is None else config_of(config, EngineConfig)
    prepared = TargetConfig(engine=served, **own)
    configure(log_format, process=prepared.name)
    run_worker(prepared.name, lambda signals: _run_target(prepared, _shown(json=json), signals))


def rank(
    connect: Annotated[Path, typer.Option(help="The socket of the target's process.")],
    rank: Annotated[int, typer.Option(help="Which one: from 1 on.")],
    config: Annotated[str, typer.Option(help="The engine's configuration as JSON.")],
) -> None:
    """Run a rank of a target, which starts it itself."""
    form = "json" if os.environ.get(LOG_FORMAT) == "json" else "text"
    configure(form, level=logging.WARNING, process=f"target rank {rank}")
    _import_transformers()
    from pilotfish.engine.processes.rank import run_rank

    run_rank(config_of(config, EngineConfig), rank, connect)


def _run_target(config: TargetConfig, show: Callable[[str], None], signals: Signals) -> None:
    """The process answers servers, and workers load, while it imports torch."""
    from pilotfish.engine.drafts.remote_drafts import RemoteDrafts
    from pilotfish.engine.prefills.remote_prefills import RemotePrefills
    from pilotfish.engine.processes.host_memory import divided
    from pilotfish.engine.tapping import with_features
    from pilotfish.engine.targets.servers import Servers
    from pilotfish.wire.curve_keys import load_pool_keys
    from pilotfish.wire.serving import WAITING
    from pilotfish.wire.sockets import ListeningChannel

    engine, keys = with_features(divided(config.engine)), load_pool_keys(config.key, config.allow)
    channel = ListeningChannel(config.listen, keys, engine.insecure, WAITING)
    with closing(Servers(channel)) as servers:
        servers.start()
        remote = RemoteDrafts(engine) if engine.mode == "async" else None
        taken = frozenset[int]() if remote is None else remote.taken
        prefills = RemotePrefills(engine, taken) if engine.prefills_elsewhere else None
        _import_transformers()
        from pilotfish.engine.targets.target_process import run_target

        def ready() -> None:
            logger.info("%s listens at %s", config.name, channel.endpoint)
            show(channel.endpoint)

        run_target(engine, servers, signals, remote, prefills, ready)


def _shown(*, json: bool) -> Callable[[str], None]:
    return lambda endpoint: print_json({"endpoint": endpoint}) if json else None


def _prepare_pool(name: str, log_format: str | None) -> None:
    level = logging.WARNING if supervised() else logging.INFO  # a worker's parent says what there is to say
    configure(log_format, level=level, process=name)
    _import_transformers()


def _import_transformers() -> None:
    from pilotfish.model.loading.serving_imports import import_for_serving

    import_for_serving()
    from pilotfish.model.loading.metadata import log_through_root

    log_through_root()
