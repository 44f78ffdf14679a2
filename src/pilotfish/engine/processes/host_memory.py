"""How the processes of an engine divide a host's free memory. Imports no torch."""

import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pilotfish.config.engine import EngineConfig
from pilotfish.config.workers import PrefillConfig
from pilotfish.errors import ParameterError

GIB = 1 << 30
SHARE = 0.9  # of the memory that is available at start, where no limit is given
_OF_A_DRAFT = GIB  # bytes that a draft worker has beside its weights and as much for KV, about


def divided(config: EngineConfig, targets: int = 1) -> EngineConfig:
    """Among `targets` and their prefill workers, before the first starts. Devices with memory of their own are not
    divided."""
    processes = targets * (1 + config.prefill_workers)
    if processes == 1 or config.memory or config.allotted or not config.device.startswith("cpu"):
        return config
    free = SHARE * free_memory() - targets * _beside(config)
    return replace(config, allotted=max(int(free / processes), 1))


class SharedHost(NamedTuple):
    large: EngineConfig
    small: EngineConfig


def shared(large: EngineConfig, targets: int, small: EngineConfig) -> SharedHost:
    """Each process gets its weights, and an equal part of the rest. Devices with memory of their own are not divided:
    ParameterError unless both engines say how much they take."""
    if targets == 0 or large.device != small.device:
        return SharedHost(large, small)
    if not small.device.startswith("cpu"):
        for field, config in (("cascade.small.kv_slots", small), ("kv_slots", large)):
            if not (config.kv_slots or config.memory):
                raise ParameterError(field, 0, f"it or memory, here and there: both models are on {small.device}")
        return SharedHost(large, small)
    processes = targets * (1 + large.prefill_workers) * large.tensor_parallel
    of_large, of_small = (
        round(one.memory * GIB) or file_size(one.target) // one.tensor_parallel for one in (large, small)
    )
    left = SHARE * free_memory() - targets * _beside(large) - processes * of_large - of_small
    sharing = (0 if large.memory else processes) + (0 if small.memory else 1)
    share = left / max(sharing, 1)
    return SharedHost(_allotted(large, of_large + share), _allotted(small, of_small + share))


def _allotted(config: EngineConfig, size: float) -> EngineConfig:
    return config if config.memory else replace(config, allotted=max(int(size), 1))


def file_size(model: Path) -> int:
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


def _beside(config: EngineConfig) -> float:
    planned = config.kv_host_memory + config.prefill_workers * PrefillConfig.segment_memory
    if config.starts_drafts and config.draft is not None:
        return planned * GIB + config.draft_workers * (2 * file_size(config.draft) + _OF_A_DRAFT)
    return planned * GIB


def free_memory() -> int:
    """Bytes that can be taken without swapping, within the process's control group."""
    free = status_bytes(Path("/proc/meminfo"), "MemAvailable")
    limit, used = (_number(Path(f"/sys/fs/cgroup/memory.{name}")) for name in ("max", "current"))
    if limit is None or used is None:
        return free
    stat = Path("/sys/fs/cgroup/memory.stat")
    files = sum(status_bytes(stat, f"{kind}_file", unit=1) for kind in ("active", "inactive"))
    return min(free, limit - used + files)  # pages of files can be given back


def status_bytes(path: Path, name: str, unit: int = 1024) -> int:
    found = re.search(rf"^{name}:?\s+(\d+)", path.read_text(), re.MULTILINE) if path.is_file() else None
    return int(found[1]) * unit if found else 0


def _number(path: Path) -> int | None:
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdigit() else None
