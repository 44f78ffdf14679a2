"""Whether a model or a pair would run, what it would take, and why not. Reads no weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pilotfish.config import EngineConfig
from pilotfish.engine.memory import MemoryPlan, device_of, plan_memory
from pilotfish.engine.vocabulary import why_unequal
from pilotfish.errors import InputError, ModelError
from pilotfish.model.checkpoint import check_weights, weight_files
from pilotfish.model.loader import DTYPES, load_config, runs_native, shape_of
from pilotfish.model.metadata import load_tokenizer, read_generation_config
from pilotfish.model.quantize import check_quantization


@dataclass(frozen=True)
class ModelFacts:
    """What stands in a model's directory."""

    directory: str
    architecture: str
    layers: str  # "12 full, 12 of window 4096"
    context: int
    vocab_size: int
    runs_on: str  # kernels, or the reference operations
    files: int
    file_bytes: int
    chat_template: bool
    eos_ids: list[int]
    sampling_defaults: dict[str, float]


@dataclass
class Report:
    """What was found; `problems` are reasons why it would not run."""

    target: ModelFacts | None = None
    draft: ModelFacts | None = None
    memory: MemoryPlan | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def would_run(self) -> bool:
        return not self.problems


def check_models(config: EngineConfig) -> Report:
    """Look at the target, at the draft if there is one, and at both together. Whatever is wrong is in the report."""
    report = Report()

    def attempt(look: Callable[[], None]) -> None:
        try:
            look()
        except InputError as error:
            report.problems.append(str(error))

    def target() -> None:
        report.target = model_facts(config.target, config)

    def draft() -> None:
        if config.draft is not None:
            report.draft = model_facts(config.draft, config)

    def together() -> None:
        if config.draft is not None:
            refuse_unequal_tokenizers(config.target, config.draft)
        report.memory = plan_memory(config)

    for look in (target, draft):
        attempt(look)
    if not report.problems:
        attempt(together)
    return report


def refuse_unequal_tokenizers(target: Path, draft: Path) -> None:
    """ModelError, which says what differs, for a pair whose token ids mean different texts."""
    reason = why_unequal(load_tokenizer(target), load_tokenizer(draft))
    if reason is not None:
        raise ModelError(f"draft: {draft} and target {target} have unequal tokenizers: {reason}")


def model_facts(directory: Path, config: EngineConfig) -> ModelFacts:
    """Of one model; an InputError where it would not run."""
    device = device_of(config)
    check_quantization(config.quantization, DTYPES[config.dtype], device)
    fields = load_config(directory)
    shape = shape_of(fields, directory)
    check_weights(directory, fields)
    files = weight_files(directory)
    generation = read_generation_config(directory, fields.eos_token_id, shape.vocab_size)
    native = runs_native(shape, device, eager=config.eager)
    return ModelFacts(
        directory=str(directory),
        architecture=fields.architectures[0],
        layers=", ".join(f"{len(g.layers)} {f'of window {g.window}' if g.window else 'full'}" for g in shape.groups),
        context=shape.context,
        vocab_size=shape.vocab_size,
        runs_on="C++ kernels" if native else "Triton" if device.type == "cuda" else "reference operations",
        files=len(files),
        file_bytes=sum(file.stat().st_size for file in files),
        chat_template=bool(load_tokenizer(directory).chat_template),
        eos_ids=sorted(generation.eos_ids),
        sampling_defaults=generation.defaults,
    )
