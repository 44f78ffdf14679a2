"""An engine's own draft workers: their cores and processes. Imports no torch, which a target imports meanwhile."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from pilotfish.config import EngineConfig, config_text
from pilotfish.engine.launch import Supervisor, WorkerState
from pilotfish.engine.placement import split_cores
from pilotfish.engine.process import WorkerSpec


class DraftWorkers:
    """Started when this is made, watched until `close`. Each listens at one of `endpoints`; `placement` says on which
    cores they and their target run."""

    def __init__(self, config: EngineConfig) -> None:
        """ParameterError for cores that cannot be used."""
        cores = frozenset(os.sched_getaffinity(0))
        self.placement = split_cores(cores, config.cores, config.draft_cores, config.draft_workers)
        self._supervisor = Supervisor()
        self.names = tuple(f"draft {i}" for i in range(config.draft_workers))
        self.endpoints = tuple(f"ipc://{self._supervisor.directory}/draft-{i}" for i in range(config.draft_workers))
        self._start(config)

    def _start(self, config: EngineConfig) -> None:
        workers = zip(self.names, self.endpoints, self.placement.drafts, strict=True)
        self._supervisor.start(
            [WorkerSpec(name, worker_command(config, endpoint, name), cores) for name, endpoint, cores in workers]
        )

    def states(self) -> Sequence[WorkerState]:
        return self._supervisor.poll()

    def close(self) -> None:
        """End them. Idempotent."""
        self._supervisor.close()


def start_draft_workers(config: EngineConfig) -> DraftWorkers | None:
    """The workers that a configuration asks for; None where drafts are elsewhere or there are none."""
    return DraftWorkers(config) if config.mode == "async" and not config.draft_pool else None


def worker_command(config: EngineConfig, endpoint: str, name: str) -> list[str]:
    """The command line of one, which starts from the configuration of its engine."""
    own = {"config": config_text(config), "listen": endpoint, "name": name}
    return [sys.executable, "-m", "pilotfish", "draft", *(f"--{option}={value}" for option, value in own.items())]
