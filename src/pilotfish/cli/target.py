"""`pilotfish target`: the target worker's process, which `serve` starts."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pilotfish.config import EngineConfig
    from pilotfish.engine.process import Signals


def target(
    connect: Annotated[str, typer.Option(help="Where the server listens: ipc://PATH.")],
    config: Annotated[str, typer.Option(help="The engine's configuration as JSON, as the server writes it.")],
) -> None:
    """Run a target worker for a server. `pilotfish serve` does so itself."""
    from pilotfish.engine.async_engine import config_of
    from pilotfish.engine.process import LOG_FORMAT, Signals, Stopped, die_with_parent, name_process, remove_directory
    from pilotfish.server.logs import configure

    configure("json" if os.environ.get(LOG_FORMAT) == "json" else "text", process="target")
    name_process("target")
    signals = Signals()
    with suppress(Stopped), signals:  # from here on there are processes to end
        die_with_parent(signal.SIGHUP)
        _run(config_of(config), connect, signals)
    if signals.received == signal.SIGHUP:
        remove_directory()


def _run(config: EngineConfig, endpoint: str, signals: Signals) -> None:
    """Draft workers load while this process imports torch."""
    from pilotfish.engine.draft_workers import start_draft_workers

    workers = start_draft_workers(config)
    from pilotfish.model.serving_imports import import_for_serving

    import_for_serving()
    from pilotfish.engine.target_process import run_target
    from pilotfish.model.metadata import log_through_root

    log_through_root()
    run_target(config, endpoint, signals, workers)
