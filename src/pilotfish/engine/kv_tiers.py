from __future__ import annotations

import math

from pilotfish.config.engine import EngineConfig
from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS
from pilotfish.engine.fingerprint import kv_fingerprint
from pilotfish.engine.processes.host_memory import GIB
from pilotfish.errors import ParameterError
from pilotfish.kv.disk import DiskStore
from pilotfish.kv.tiers import HostStore, KVTiers
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.kv_copy import copier_of
from pilotfish.model.loading.configuration import common_window

#: GiB on disk, where no size is given.
DISK_SIZE = 16.0


def make_tiers(config: EngineConfig, executor: TorchExecutor) -> KVTiers | None:
    """ParameterError for an unusable directory, for tiers too small, and for any if every layer has a window: there
    requests give back slots that tiers would have to load first."""
    if not config.kv_host_memory and config.kv_disk is None:
        return None
    if common_window(executor.model.config):
        field = "kv_disk" if config.kv_disk is not None else "kv_host_memory"
        raise ParameterError(field, getattr(config, field), "none for a model whose layers all have sliding windows")
    copier = copier_of(executor.kv)
    least = math.ceil(executor.context / OBJECT_TOKENS) * copier.object_bytes
    shape, host, disk = kv_fingerprint(config, executor), None, None
    if config.kv_host_memory:
        host = HostStore(_bytes("kv_host_memory", config.kv_host_memory, least, executor.context), copier.object_bytes)
    if config.kv_disk is not None:
        size = _bytes("kv_disk_size", config.kv_disk_size or DISK_SIZE, least, executor.context)
        disk = DiskStore(config.kv_disk, size, shape, copier.object_bytes)
    return KVTiers(copier, executor.num_slots, shape, host, disk)


def _bytes(field: str, given: float, least: int, context: int) -> int:
    size = round(given * GIB)
    if size < least:
        needed = math.ceil(1000 * least / GIB) / 1000
        raise ParameterError(field, given, f"at least {needed:g} GiB: a sequence of {context} tokens takes that")
    return size
