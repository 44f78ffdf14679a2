"""What is known of models before they are loaded: how much memory they take, and whether they would run; and the
loading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pilotfish.config.engine import EngineConfig
from pilotfish.core.vocabulary import why_unequal
from pilotfish.engine.heads import ConfiguredHead
from pilotfish.engine.host_memory import GIB, SHARE, free_memory, status_bytes
from pilotfish.errors import InputError, ModelError, ParameterError
from pilotfish.grammar.compile import why_no_grammar
from pilotfish.heads.detect import is_head
from pilotfish.heads.facts import HeadFacts, head_facts
from pilotfish.heads.target_facts import TargetFacts
from pilotfish.model.checkpoint import check_weights, weight_files
from pilotfish.model.collective import Group
from pilotfish.model.features import layer_windows
from pilotfish.model.loader import (
    Footprint,
    LoadedModel,
    footprint,
    load_config,
    load_model,
    runs_native,
)
from pilotfish.model.metadata import load_tokenizer, read_generation_config
from pilotfish.model.precision import Precision, precision_of
from pilotfish.model.quantize import check_quantization, load_torchao

#: The fewest KV slots that are worth a start.
MIN_SLOTS = 256
#: The most where memory is shared with everything else and no limit is given: on a CPU.
SHARED_SLOTS = 65536


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes, and the KV slots of each pool. The pages of weight files that are mapped while they are read come on
    top; the system takes those back as it likes."""

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
        """A token's keys and values in both pools."""
        return sum(model.slot for model in self.models)

    @property
    def workspace(self) -> int:
        """Of the largest forward; target and draft take turns."""
        return self.max_rows * max(model.row for model in self.models)

    @property
    def fixed(self) -> int:
        """All but KV."""
        return self.runtime + self.weights + self.workspace + self.host

    @property
    def total(self) -> int:
        """The most at any time: while serving or, where one layer's quantization takes more than all KV, before."""
        return self.with_slots(self.slots)

    def with_slots(self, slots: int) -> int:
        loading = self.runtime + self.weights + max(model.loading for model in self.models)
        return max(self.fixed + slots * self.slot, loading)

    @property
    def with_kv(self) -> int:
        """While serving."""
        return self.fixed + self.slots * self.slot

    @property
    def slots_that_fit(self) -> int:
        return (self.limit - self.fixed) // self.slot

    @property
    def draft_in_slots(self) -> int:
        """The target's slots that the memory of the draft would hold."""
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
    """As many KV slots as the requests can use and the memory holds, or as many as asked for, beside bytes for
    `segments`. A draft pool's `head` is all that it runs. ModelError, with what would fit, where that is too much."""
    plan = _without_slots(config, segments, head)
    needed = config.kv_slots or MIN_SLOTS
    if plan.with_slots(needed) > plan.limit:
        raise ModelError(_too_large(config, plan, needed, segments, head))
    useful = _useful_slots(config, config.target if head is None else head.target.directory)
    return replace(plan, slots=config.kv_slots or max(MIN_SLOTS, min(useful, plan.slots_that_fit)))


def _useful_slots(config: EngineConfig, target: Path) -> int:
    """Slots that the longest sequences need together."""
    context: int = load_config(target, config.max_model_len).context
    shared = config.memory == 0 and device_of(config).type == "cpu"
    return min(config.max_requests * context, SHARED_SLOTS if shared else 1 << 62)


def _without_slots(config: EngineConfig, segments: int = 0, head: ConfiguredHead | None = None) -> MemoryPlan:
    device = device_of(config)

    def of(directory: Path, max_model_len: int = 0, ranks: int = 1) -> Footprint:
        dtype = precision_here(config, directory).dtype
        return footprint(
            directory,
            dtype,
            device,
            eager=config.eager,
            quantization=config.quantization,
            kv_dtype=config.kv_dtype,
            max_model_len=max_model_len,
            ranks=ranks,
        )

    if config.quantization != "none":
        load_torchao()  # before the runtime is measured
    runtime = anonymous_memory() if device.type == "cpu" else 0
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
    """Of the draft beside the target."""
    assert config.draft is not None  # whoever asks has one
    if not is_head(config.draft):
        return of(config.draft)
    dtype = precision_here(config, config.target).dtype
    return ConfiguredHead.of(config, config.draft, config.target).footprint(dtype)


def _unlimited(config: EngineConfig, device: torch.device, runtime: int, host: int) -> int:
    """The limit where none is given. Ranks on a CPU share its memory; the others have no process yet."""
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
    """Ways to need less, or to have more, that fit, and what they need."""
    smaller = {
        f"--kv-slots {MIN_SLOTS}": (config, MIN_SLOTS),
        "--mode off": (replace(config, mode="off"), slots),
        "--dtype bfloat16": (replace(config, dtype="bfloat16"), slots),
        "--quantization int8": (replace(config, quantization="int8"), slots),
        "--kv-dtype int8": (replace(config, kv_dtype="int8"), slots),
        f"--mode off --quantization int8 --kv-slots {MIN_SLOTS}": (
            replace(config, mode="off", quantization="int8"),
            MIN_SLOTS,
        ),
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
    """Load one of the configured models on the configured device, or this rank's shard of it."""
    return load_model(
        directory,
        precision_here(config, directory).dtype,
        device_of(config),
        eager=config.eager,
        quantization=config.quantization,
        kv_dtype=config.kv_dtype,
        max_model_len=max_model_len,
        group=group,
    )


def precision_here(config: EngineConfig, directory: Path) -> Precision:
    """Of one of the configured models on the configured device, as this machine has it."""
    return precision_of(config.dtype, load_config(directory), device_of(config), eager=config.eager)


def device_named(name: str, field: str = "device") -> torch.device:
    """ParameterError, naming `field`, if this machine does not have it."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ParameterError(field, name, "cpu or cuda") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ParameterError(field, name, "cpu, or cuda where there is one")
    return device


def device_of(config: EngineConfig) -> torch.device:
    """ParameterError if this machine does not have it."""
    device = device_named(config.device)
    if device.type == "cuda" and config.tensor_parallel > (devices := torch.cuda.device_count()):
        raise ParameterError("tensor_parallel", config.tensor_parallel, f"at most {devices}, the GPUs of this machine")
    return device


def anonymous_memory() -> int:
    """Bytes of this process that no file backs; 0 where the system does not say."""
    return status_bytes(Path("/proc/self/status"), "RssAnon")


def available_memory(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()


# -- checks


@dataclass(frozen=True)
class ModelFacts:
    directory: str
    architecture: str
    layers: str  # "12 full, 12 of window 4096"
    context: int
    vocab_size: int
    runs_on: str  # kernels, or the reference operations
    dtype: str
    files: int
    file_bytes: int
    chat_template: bool
    eos_ids: list[int]
    sampling_defaults: dict[str, float]


@dataclass
class CheckReport:
    """Facts about the models; `problems` are reasons why they would not run."""

    target: ModelFacts | None = None
    draft: ModelFacts | None = None
    head: HeadFacts | None = None  # the draft, where it is a trained head
    memory: MemoryPlan | None = None
    problems: list[str] = field(default_factory=list)
    no_structured_output: str | None = None  # why outputs of the target cannot follow a grammar

    @property
    def would_run(self) -> bool:
        return not self.problems

    @contextmanager
    def noting_problems(self) -> Iterator[None]:
        try:
            yield
        except InputError as error:
            self.problems.append(str(error))


def check_models(config: EngineConfig) -> CheckReport:
    """Check the target, the draft if there is one, and both together. The report holds all that is wrong."""
    report = CheckReport()
    with report.noting_problems():
        report.target = model_facts(config.target, config)
    with report.noting_problems():
        if config.draft is not None and is_head(config.draft):
            report.head = head_facts(config.draft, TargetFacts.read(config.target), config.draft_layers or None)
        elif config.draft is not None:
            report.draft = model_facts(config.draft, config)
    if report.would_run:
        with report.noting_problems():
            tokenizer = load_tokenizer(config.target)
            if config.draft is not None and report.head is None:
                load_draft_tokenizer(config.draft, config.target, tokenizer)
            report.memory = plan_memory(config)
            if (facts := report.target) is not None:
                report.no_structured_output = why_no_grammar(tokenizer, facts.vocab_size, facts.eos_ids)
    return report


def load_draft_tokenizer(draft: Path, target: Path, own: Any) -> Any:
    """The draft's tokenizer; ModelError, which says what differs, if its token ids stand for other texts in the
    target's `own`."""
    tokenizer = load_tokenizer(draft)
    reason = why_unequal(own, tokenizer)
    if reason is not None:
        raise ModelError(f"draft: {draft} and target {target} have unequal tokenizers: {reason}")
    return tokenizer


def model_facts(directory: Path, config: EngineConfig) -> ModelFacts:
    """InputError if the model would not run."""
    device, fields, precision = device_of(config), load_config(directory), precision_here(config, directory)
    check_quantization(config.quantization, precision.dtype, device)
    check_weights(directory, fields)
    files = weight_files(directory)
    generation = read_generation_config(directory, fields.eos_token_id, fields.vocab_size)
    native, windows = runs_native(fields, device, eager=config.eager), Counter(layer_windows(fields))
    return ModelFacts(
        directory=str(directory),
        architecture=fields.architectures[0],
        layers=", ".join(f"{n} {f'of window {window}' if window else 'full'}" for window, n in sorted(windows.items())),
        context=fields.max_position_embeddings,
        vocab_size=fields.vocab_size,
        runs_on="C++ kernels" if native else "Triton" if device.type == "cuda" else "reference operations",
        dtype=precision.name,
        files=len(files),
        file_bytes=sum(file.stat().st_size for file in files),
        chat_template=bool(load_tokenizer(directory).chat_template),
        eos_ids=sorted(generation.eos_ids),
        sampling_defaults=generation.defaults,
    )
