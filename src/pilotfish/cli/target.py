"""`pilotfish target`: the target worker's process, which `serve` starts."""

from __future__ import annotations

import os
from typing import Annotated

import typer


def target(
    connect: Annotated[str, typer.Option(help="Where the server listens: ipc://PATH.")],
    config: Annotated[str, typer.Option(help="The engine's configuration as JSON, as the server writes it.")],
) -> None:
    """Run a target worker for a server. `pilotfish serve` does so itself."""
    from pilotfish.engine.async_engine import config_of
    from pilotfish.engine.draft_workers import start_draft_workers
    from pilotfish.engine.process import LOG_FORMAT
    from pilotfish.server.logs import configure

    configure("json" if os.environ.get(LOG_FORMAT) == "json" else "text", process="target")
    parsed = config_of(config)
    workers = start_draft_workers(parsed)  # they load while this process imports torch
    from pilotfish.model.serving_imports import import_for_serving

    import_for_serving()
    from pilotfish.engine.target_process import run_target
    from pilotfish.model.quiet import log_through_root

    log_through_root()
    run_target(parsed, connect, workers)
