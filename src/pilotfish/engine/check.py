"""Checks whether a model or a pair would run, and how much memory it would take. Reads no weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pilotfish.config import EngineConfig
from pilotfish.core.vocabulary import why_unequal
from pilotfish.engine.memory import MemoryPlan, device_of, plan_memory
from pilotfish.errors import InputError, ModelError
from pilotfish.model.checkpoint import check_weights, weight_files
from pilotfish.model.loader import DTYPES, load_config, runs_native, shape_of
from pilotfish.model.metadata import load_tokenizer, read_generation_config
from pilotfish.model.quantize import check_quantization


@dataclass(frozen=True)
class ModelFacts:
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
class CheckReport:
    """Facts about the models; `problems` are reasons why they would not run."""

    target: ModelFacts | None = None
    draft: ModelFacts | None = None
    memory: MemoryPlan | None = None
    problems: list[str] = field(default_factory=list)

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
        report.draft = None if config.draft is None else model_facts(config.draft, config)
    if report.would_run:
        with report.noting_problems():
            if config.draft is not None:
                refuse_unequal_tokenizers(config.target, config.draft)
            report.memory = plan_memory(config)
    return report


def refuse_unequal_tokenizers(target: Path, draft: Path) -> None:
    """ModelError, which says what differs, if token ids of one stand for other texts in the other."""
    reason = why_unequal(load_tokenizer(target), load_tokenizer(draft))
    if reason is not None:
        raise ModelError(f"draft: {draft} and target {target} have unequal tokenizers: {reason}")


def model_facts(directory: Path, config: EngineConfig) -> ModelFacts:
    """InputError if the model would not run."""
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
