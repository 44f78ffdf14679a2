"""Imports no torch."""

import os
from dataclasses import dataclass, replace

from pilotfish.config.engine import EngineConfig
from pilotfish.config.server import ServerConfig
from pilotfish.engine.processes.host_memory import divided
from pilotfish.engine.processes.placement import equal_parts
from pilotfish.errors import ParameterError

TARGET = "target"
#: Options that several targets of a host cannot share, and what each may have instead.
ALONE = {
    "draft_cores": "none with replicas, each of which divides its own cores",
    "prefill_cores": "none with replicas, each of which divides its own cores",
    "trace": "none with replicas: a timeline is of one target",
    "kv_disk": "none with replicas: a directory belongs to one target",
}


@dataclass(frozen=True)
class OwnTarget:
    name: str
    config: EngineConfig
    cores: frozenset[int] = frozenset()  # of its process, and of the workers that it starts; empty: those of the server


def num_own(config: EngineConfig, server: ServerConfig) -> int:
    if server.replicas is not None:
        return server.replicas
    return int(not server.target_pool and config.members is None)


def own_targets(config: EngineConfig, count: int, name: str = TARGET) -> list[OwnTarget]:
    """Several divide the cores and memory of one. ParameterError for what they cannot divide."""
    if count <= 1:
        return [OwnTarget(name, config)] * count
    for field, allowed in ALONE.items():
        if value := getattr(config, field):
            raise ParameterError(field, str(value), allowed)
    if not config.device.startswith("cpu"):
        allowed = "cpu with replicas; elsewhere one `pilotfish target` for each device, and --target-pool"
        raise ParameterError("device", config.device, allowed)
    cores = equal_parts(config.core_set or frozenset(os.sched_getaffinity(0)), count)
    each = replace(divided(config, count), cores="")
    return [OwnTarget(f"{name} {i}", each, part) for i, part in enumerate(cores)]
