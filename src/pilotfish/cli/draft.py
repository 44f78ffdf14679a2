"""`pilotfish draft`: a draft pool that listens for targets."""

from __future__ import annotations

import json as json_text
import logging
import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from pilotfish.cli.options import (
    DeviceOption,
    DTypeOption,
    EagerOption,
    JsonOption,
    KVSlotsOption,
    MemoryOption,
    PaceOption,
    QuantizationOption,
    ThreadsOption,
    TraceOption,
    machine,
    model_directory,
    resolve_models,
)
from pilotfish.config import DraftConfig, DType, EngineConfig, Quantization
from pilotfish.engine.process import LOG_FORMAT
from pilotfish.errors import InputError, ParameterError
from pilotfish.printable import OneLineFormatter

DEFAULT_PAIR = "pycode"


def draft(
    listen: Annotated[str, typer.Option(help="ipc://PATH or tcp://HOST:PORT.")],
    draft: Annotated[Path | None, typer.Option(help="The draft's directory in Hugging Face format.")] = None,
    pair: Annotated[str | None, typer.Option(help="The bundled pair whose draft to run: pycode, the default.")] = None,
    name: Annotated[str, typer.Option(help="What ps and logs call it.")] = DraftConfig.name,
    key: Annotated[Path | None, typer.Option(help="This pool's key file, as `pilotfish keys new` makes it.")] = None,
    allow: Annotated[Path | None, typer.Option(help="The allowlist: who may come, and their weights.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond this host without keys.")] = False,
    leaves: Annotated[int, typer.Option(help="Nodes that a forward expands.")] = DraftConfig.leaves,
    children: Annotated[int, typer.Option(help="Children that an expanded node gets.")] = DraftConfig.children,
    dtype: DTypeOption = EngineConfig.dtype,
    quantization: QuantizationOption = EngineConfig.quantization,
    device: DeviceOption = EngineConfig.device,
    threads: ThreadsOption = EngineConfig.threads,
    cores: Annotated[str, machine(help="Cores to run on, as in 0,2-3.", show_default="all")] = EngineConfig.cores,
    kv_slots: KVSlotsOption = EngineConfig.kv_slots,
    memory: MemoryOption = EngineConfig.memory,
    pace: PaceOption = EngineConfig.pace,
    trace: TraceOption = None,
    eager: EagerOption = False,
    log_format: Annotated[
        str | None, typer.Option(envvar=LOG_FORMAT, help="json or text: with times, as a server's lines.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Run a draft pool: targets attach to it with --mode async --draft-pool. Ends on Ctrl-C or SIGTERM.

    With --json one line on stdout says where it listens, once it serves."""
    model = EngineConfig(
        target=_directory(draft, pair),
        dtype=cast(DType, dtype),
        quantization=cast(Quantization, quantization),
        device=device,
        threads=threads,
        cores=cores,
        kv_slots=kv_slots,
        memory=memory,
        pace=pace,
        trace=trace,
        eager=eager,
    )
    config = DraftConfig(
        model=model,
        listen=listen,
        name=name,
        key=key,
        allow=allow,
        insecure=insecure,
        leaves=leaves,
        children=children,
    )
    from pilotfish.engine.process import supervised
    from pilotfish.model.serving_imports import import_for_serving

    level = logging.WARNING if supervised() else logging.INFO  # a worker's parent says what there is to say
    _configure_log(log_format, name, level)
    import_for_serving()
    from pilotfish.model.metadata import log_through_root

    log_through_root()
    from pilotfish.engine.draft_pool import run_pool

    run_pool(config, _tell if json else lambda _: None)


def _configure_log(form: str | None, name: str, level: int) -> None:
    if form not in (None, "json", "text"):
        raise ParameterError("log_format", form, "json or text")
    if form is not None:
        from pilotfish.server.logs import LogFormat, configure

        configure(cast(LogFormat, form), level=level, process=name)
        return
    handler = logging.StreamHandler()
    handler.setFormatter(OneLineFormatter(f"pilotfish {name.replace('%', '%%')}: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def _tell(endpoint: str) -> None:
    sys.stdout.write(json_text.dumps({"endpoint": endpoint}) + "\n")
    sys.stdout.flush()


def _directory(draft: Path | None, pair: str | None) -> Path:
    if draft is not None and pair is not None:
        raise InputError("draft: it cannot be combined with --pair; give one of them")
    if draft is not None:
        return model_directory("draft", draft)
    found = resolve_models(pair or DEFAULT_PAIR, None, None).draft
    assert found is not None  # a pair has one
    return found
