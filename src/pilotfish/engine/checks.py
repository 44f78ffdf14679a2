from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pilotfish.config.engine import EngineConfig
from pilotfish.core.drafting.vocabulary import why_unequal
from pilotfish.engine.memory import MemoryPlan, device_of, plan_memory, precision_here
from pilotfish.errors import InputError, ModelError
from pilotfish.grammar.compile import why_no_grammar
from pilotfish.model.cpu.native import runs_native
from pilotfish.model.heads.files import HeadFacts, head_facts
from pilotfish.model.heads.target import TargetFacts
from pilotfish.model.heads.weights import is_head
from pilotfish.model.loading.checkpoint import check_weights
from pilotfish.model.loading.configuration import key_size, layer_windows, load_config
from pilotfish.model.loading.metadata import load_tokenizer, read_generation_config
from pilotfish.model.loading.quantize import check_quantization
from pilotfish.model.loading.tensors import weight_files


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
    """ModelError, naming the difference, if its token ids stand for other texts in the target's `own`."""
    tokenizer = load_tokenizer(draft)
    reason = why_unequal(own, tokenizer)
    if reason is not None:
        raise ModelError(f"draft: {draft} and target {target} have unequal tokenizers: {reason}")
    return tokenizer


def model_facts(directory: Path, config: EngineConfig) -> ModelFacts:
    """InputError if the model would not run."""
    device, fields, precision = device_of(config), load_config(directory), precision_here(config, directory)
    check_quantization(config.quantization, precision.dtype, device, fields.quant_method)
    check_weights(directory, fields)
    files = weight_files(directory)
    generation = read_generation_config(directory, fields.eos_token_id, fields.vocab_size)
    native, windows = runs_native(key_size(fields), device, eager=config.eager), Counter(layer_windows(fields))
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
