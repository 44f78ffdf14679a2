"""An engine's own draft workers: their processes and cores. Imports no torch, which a target imports meanwhile."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pilotfish.config import EngineConfig, config_text, parse_cores
from pilotfish.engine.launch import Supervisor, WorkerState
from pilotfish.engine.process import WorkerSpec
from pilotfish.errors import ParameterError

logger = logging.getLogger(__name__)

#: By default a draft worker has one core of so many, and at least one.
CORES_PER_DRAFT_CORE = 8


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
    """The command line of one, which starts from the configuration of its engine, less the target's cores: a worker may
    not use them."""
    own = {"config": config_text(replace(config, cores="")), "listen": endpoint, "name": name}
    return [sys.executable, "-m", "pilotfish", "draft", *(f"--{option}={value}" for option, value in own.items())]


# -- cores


@dataclass(frozen=True)
class Placement:
    """Sets of core numbers; an empty one: wherever the system likes."""

    target: frozenset[int]
    drafts: tuple[frozenset[int], ...]  # by worker


def split_cores(available: frozenset[int], target: str, draft: str, workers: int) -> Placement:
    """Cores of the target and of `workers` draft workers, 1 or more. `target` and `draft`, as in "0,2-3", say which; ""
    leaves it to the rule: each draft worker has an eighth of the `available` cores, at least one, together at most
    half, the last ones; the target has all others. Where no core is left for one of the two, it shares the other's,
    with a warning. ParameterError for sets that overlap or that this process may not use.
    """
    own, drafts = parse_cores(target, "cores"), parse_cores(draft, "draft_cores")
    if own & drafts:
        raise ParameterError("draft_cores", draft, f"other cores than the target's, {target}")
    drafts = drafts or _last(available - own, _draft_cores(len(available), workers))
    own = own or available - drafts
    if available and not (own and drafts):
        own = drafts = own or drafts
        logger.warning("target and draft share cores %s: they will slow each other down", sorted(own))
    return Placement(own, _divided(drafts, workers))


def _draft_cores(available: int, workers: int) -> int:
    return min(workers * max(1, available // CORES_PER_DRAFT_CORE), available // 2)


def _last(cores: frozenset[int], count: int) -> frozenset[int]:
    return frozenset(sorted(cores)[max(0, len(cores) - count) :])


def _divided(cores: frozenset[int], workers: int) -> tuple[frozenset[int], ...]:
    """Equal parts of neighbours; of fewer cores than workers, one each that several share."""
    ordered = sorted(cores)
    starts = [i * len(ordered) // workers for i in range(workers + 1)]
    return tuple(frozenset(ordered[start : max(start + 1, end)]) for start, end in pairwise(starts))
