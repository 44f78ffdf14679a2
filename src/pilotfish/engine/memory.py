from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import torch

from pilotfish.config.engine import EngineConfig
from pilotfish.engine.heads import ConfiguredHead
from pilotfish.engine.processes.host_memory import GIB, SHARE, free_memory, status_bytes
from pilotfish.errors import ModelError, ParameterError
from pilotfish.model.collective import Group
from pilotfish.model.heads.weights import is_head
from pilotfish.model.loading.configuration import load_config
from pilotfish.model.loading.footprint import Footprint, footprint
from pilotfish.model.loading.loader import LoadedModel, load_model
from pilotfish.model.loading.metadata import one_line
from pilotfish.model.loading.precision import Precision, precision_of

MIN_SLOTS = 256  # the fewest KV slots that are worth a start
SHARED_SLOTS = 65536  # the most where memory is shared with everything else and no limit is given: on a CPU


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes, and the KV slots of each pool. Mapped pages of weight files come on top."""

    limit: int
    runtime: int  # the process before it holds a model
    target: Footprint
    draft: Footprint | None
    max_rows: int
    slots: int
    host: int = 0  # of KV beyond the pool, and of segments, where that is the same memory
    ranks: int = 1  # of the target: all of this is rank 0's, and the others take no more

    @property
    def models(self) -> tuple[Footprint, ...]:
        return (self.target,) if self.draft is None else (self.target, self.draft)

    @property
    def weights(self) -> int:
        return sum(model.weights for model in self.models)

    @property
    def slot(self) -> int:
        return sum(model.slot for model in self.models)

    @property
    def workspace(self) -> int:
        return self.max_rows * max(model.row for model in self.models)

    @property
    def fixed(self) -> int:
        return self.runtime + self.weights + self.workspace + self.host

    @property
    def total(self) -> int:
        """The peak: while serving or, if one layer's quantization takes more than all KV, before."""
        return self.with_slots(self.slots)

    def with_slots(self, slots: int) -> int:
        loading = self.runtime + self.weights + max(model.loading for model in self.models)
        return max(self.fixed + slots * self.slot, loading)

    @property
    def with_kv(self) -> int:
        return self.fixed + self.slots * self.slot

    @property
    def draft_in_slots(self) -> int:
        if self.draft is None:
            return 0
        return (self.draft.weights + self.slots * self.draft.slot) // self.target.slot

    def describe(self) -> str:
        kv = f"{self.slots} KV slots of {self.slot} bytes {gib(self.slots * self.slot)}"
        parts = [f"weights {gib(self.weights)}", kv]
        parts += [f"workspace {gib(self.workspace)}", f"runtime {gib(self.runtime)}"]
        parts += [f"KV beside {gib(self.host)}"] if self.host else []
        peak = f" ({gib(self.total)} while it is quantized)" if self.total > self.with_kv else ""
        ranks = f" in each of {self.ranks} ranks" if self.ranks > 1 else ""
        draft = f"; the draft takes what {self.draft_in_slots} KV slots would" if self.draft else ""
        return f"memory: {' + '.join(parts)} = {gib(self.with_kv)}{peak} of {gib(self.limit)} GiB{ranks}{draft}"


def gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def plan_memory(config: EngineConfig, segments: int = 0, head: ConfiguredHead | None = None) -> MemoryPlan:
    """As many KV slots as asked for, or as requests can use and the memory holds, beside bytes for `segments`. A draft
    pool with a `head` runs nothing else. ModelError, with what would fit, if that is too much."""
    plan = _without_slots(config, segments, head)
    needed = config.kv_slots or MIN_SLOTS
    if plan.with_slots(needed) > plan.limit:
        raise ModelError(_too_large(config, plan, needed, segments, head))
    context: int = load_config(config.target if head is None else head.target.directory, config.max_model_len).context
    shared = config.memory == 0 and device_of(config).type == "cpu"
    useful = min(config.max_requests * context, SHARED_SLOTS if shared else 1 << 62)
    fit = (plan.limit - plan.fixed) // plan.slot
    return replace(plan, slots=config.kv_slots or max(MIN_SLOTS, min(useful, fit)))


def _without_slots(config: EngineConfig, segments: int, head: ConfiguredHead | None) -> MemoryPlan:
    device = device_of(config)

    def of(directory: Path, max_model_len: int = 0, ranks: int = 1) -> Footprint:
        return footprint(directory, **_configured(config, directory), max_model_len=max_model_len, ranks=ranks)

    runtime = status_bytes(Path("/proc/self/status"), "RssAnon") if device.type == "cpu" else 0
    host = round(config.kv_host_memory * GIB) + segments if device.type == "cpu" else 0
    limit = round(config.memory * GIB) or _unlimited(config, device, runtime, host)
    if head is not None:
        target, draft = head.footprint(precision_here(config, head.target.directory).dtype), None
    else:
        target, draft = of(config.target, config.max_model_len, config.tensor_parallel), None
        if config.mode == "sync" and "lm" in config.drafters and config.draft is not None:
            draft = _of_draft(config, of)
        if config.features is not None:
            tapped = ConfiguredHead.of(config, config.features, config.target)
            target = tapped.tapped(target, precision_here(config, config.target).dtype)
    return MemoryPlan(limit, runtime, target, draft, config.max_rows, 0, host, config.tensor_parallel)


def _of_draft(config: EngineConfig, of: Callable[[Path], Footprint]) -> Footprint:
    assert config.draft is not None  # whoever asks has one
    if not is_head(config.draft):
        return of(config.draft)
    return ConfiguredHead.of(config, config.draft, config.target).footprint(precision_here(config, config.target).dtype)


def _unlimited(config: EngineConfig, device: torch.device, runtime: int, host: int) -> int:
    if config.allotted:
        return config.allotted + host
    ranks = config.tensor_parallel if device.type == "cpu" else 1
    return runtime + round(SHARE * available_memory(device) - (ranks - 1) * runtime) // ranks


def _too_large(config: EngineConfig, plan: MemoryPlan, slots: int, segments: int, head: ConfiguredHead | None) -> str:
    need = plan.with_slots(slots)
    would = [f"{name} ({gib(size)} GiB)" for name, size in _alternatives(config, slots, segments, head)]
    fits = f"what would fit: {', '.join(would)}" if would else "nothing that is offered here would fit"
    return f"memory: {slots} KV slots and all else need {gib(need)} GiB; {gib(plan.limit)} are to be had; {fits}"


def _alternatives(
    config: EngineConfig, slots: int, segments: int, head: ConfiguredHead | None
) -> list[tuple[str, int]]:
    off = replace(config, mode="off")
    smaller = {
        f"--kv-slots {MIN_SLOTS}": (config, MIN_SLOTS),
        "--mode off": (off, slots),
        "--dtype bfloat16": (replace(config, dtype="bfloat16"), slots),
        "--quantization int8": (replace(config, quantization="int8"), slots),
        "--kv-dtype int8": (replace(config, kv_dtype="int8"), slots),
        f"--mode off --quantization int8 --kv-slots {MIN_SLOTS}": (replace(off, quantization="int8"), MIN_SLOTS),
    }
    if config.prefill_workers and config.allotted:
        smaller["--prefill-workers 0"] = (replace(config, prefill_workers=0, allotted=0), slots)
    needs = list[tuple[str, int]]()
    for name, (other, count) in smaller.items():
        with suppress(ParameterError):  # a dtype that this machine is slow in
            plan = _without_slots(other, segments, head)
            if (size := plan.with_slots(count)) <= plan.limit:
                needs.append((name, size))
    return needs


def load_configured(
    config: EngineConfig, directory: Path, max_model_len: int = 0, group: Group | None = None
) -> LoadedModel:
    return load_model(directory, **_configured(config, directory), max_model_len=max_model_len, group=group)


def _configured(config: EngineConfig, directory: Path) -> dict[str, Any]:
    same = {name: getattr(config, name) for name in ("eager", "quantization", "kv_dtype")}
    return {"dtype": precision_here(config, directory).dtype, "device": device_of(config), **same}


def precision_here(config: EngineConfig, directory: Path) -> Precision:
    return precision_of(config.dtype, load_config(directory), device_of(config), eager=config.eager)


def device_named(name: str, field: str = "device") -> torch.device:
    """ParameterError, naming `field`, if this machine lacks it."""
    allowed = "cpu, or cuda where there is one"
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise ParameterError(field, name, allowed)
    try:
        device = torch.device(name)
        with catch_warnings(action="ignore"):  # PyTorch's own words take several lines
            if device.type == "cuda" and not torch.cuda.is_available():
                torch.cuda.init()  # type: ignore[no-untyped-call]  # says why
        return device
    except (AssertionError, RuntimeError) as error:
        raise ParameterError(field, name, f"{allowed}; here: {one_line(error)}") from error


def device_of(config: EngineConfig) -> torch.device:
    device = device_named(config.device)
    if device.type == "cuda" and config.tensor_parallel > (devices := torch.cuda.device_count()):
        raise ParameterError("tensor_parallel", config.tensor_parallel, f"at most {devices}, the GPUs of this machine")
    return device


def available_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return free_memory()
    return torch.cuda.mem_get_info(str(device))[0]
