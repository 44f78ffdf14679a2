"""The engine of a command."""

from __future__ import annotations

from pilotfish.cli.show import status
from pilotfish.config import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.engine.process import name_process


def started(config: EngineConfig) -> Engine:
    """With its models loaded. Beside drafts in processes of their own, this one is called what it is too."""
    if config.mode == "async":
        name_process("target")
    with status(f"loading {config.target}"):
        return Engine(config)
