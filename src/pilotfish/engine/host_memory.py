"""What is free of a host's memory, and how the processes of an engine divide it. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from pilotfish.config.engine import EngineConfig
from pilotfish.config.workers import PrefillConfig

GIB = 1 << 30
#: Of the memory that is available at start, where no limit is given.
SHARE = 0.9
#: Bytes that a draft worker has beside its weights and as much for KV, about.
_OF_A_DRAFT = GIB


def divided(config: EngineConfig, targets: int = 1) -> EngineConfig:
    """Says how much each of `targets` and each of their prefill workers may take where they are to share a host: each
    by itself would take most of what is free. To be called before the first of them starts. Devices that have memory of
    their own are not divided."""
    processes = targets * (1 + config.prefill_workers)
    if processes == 1 or config.memory or config.allotted or not config.device.startswith("cpu"):
        return config
    beyond = config.kv_host_memory + config.prefill_workers * PrefillConfig.segment_memory  # planned by each on top
    free = SHARE * free_memory() - targets * (beyond * GIB + _of_drafts(config))
    return replace(config, allotted=max(int(free / processes), 1))


def _of_drafts(config: EngineConfig) -> int:
    if not config.starts_drafts or config.draft is None:
        return 0
    weights = sum(path.stat().st_size for path in config.draft.glob("*.safetensors"))
    return config.draft_workers * (2 * weights + _OF_A_DRAFT)


def free_memory() -> int:
    """Bytes that can be taken without swapping, within the limit of the process's control group."""
    free = status_bytes(Path("/proc/meminfo"), "MemAvailable")
    limit, used = (_number(Path(f"/sys/fs/cgroup/memory.{name}")) for name in ("max", "current"))
    if limit is None or used is None:
        return free
    stat = Path("/sys/fs/cgroup/memory.stat")
    files = sum(status_bytes(stat, f"{kind}_file", unit=1) for kind in ("active", "inactive"))
    return min(free, limit - used + files)  # pages of files can be given back


def status_bytes(path: Path, name: str, unit: int = 1024) -> int:
    """A line of a file of the system's; 0 where it has none."""
    found = re.search(rf"^{name}:?\s+(\d+)", path.read_text(), re.MULTILINE) if path.is_file() else None
    return int(found[1]) * unit if found else 0


def _number(path: Path) -> int | None:
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdigit() else None
