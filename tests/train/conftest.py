"""Recipes small enough to run in seconds, on a handful of made-up packages; a target that they are about."""

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import GenerationConfig, PreTrainedTokenizerFast

from pilotfish.progress import PhaseProgress
from pilotfish.train import evaluate
from pilotfish.train.evaluate import Evaluation
from pilotfish.train.models import build_model, export_model
from pilotfish.train.pair import train_pair
from pilotfish.train.recipes import LlamaSize, PairRecipe
from pilotfish.train.text import lessons
from pilotfish.train.text.data import collect, train_tokenizer

TINY = LlamaSize(layers=1, hidden=64, heads=2, kv_heads=1, ffn=64)
#: Tokens of the vocabulary, and positions, of `target`.
VOCAB, CONTEXT = 300, 512


@pytest.fixture(scope="session", autouse=True)
def _little_text() -> Iterator[None]:
    """A target writes 8 rows at a time, few tokens in each, and few of held-out text. One thread, as tests have: the
    number counts for the last bits."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in (
            *((lessons, "SAMPLED_ROWS", 8), (lessons, "HELD_OUT_ROWS", 8), (lessons, "PROMPT", 96)),
            *((evaluate, "PROMPT", 96), (evaluate, "PROMPTS", 4), (evaluate, "CONTINUED", 16)),
            (evaluate, "ROWS", 16),
        ):
            patch.setattr(module, name, value)
        yield


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages `alpha`, `beta` (with a test) and a module `gamma`, some 12 kB of distinct functions."""
    root = tmp_path_factory.mktemp("sources")
    for package in ("alpha", "beta"):
        (root / package).mkdir()
        for number in range(6):
            (root / package / f"m{number}.py").write_text(_module(package, number))
    (root / "test_beta.py").write_text("from beta import m0\n\nassert m0.beta_0_0(1)\n")
    (root / "gamma.py").write_text(_module("gamma", 0))
    return root


def _module(package: str, number: int) -> str:
    return "\n".join(
        f"def {package}_{number}_{index}(value):\n    total = value * {index}\n    return total + {number}\n"
        for index in range(12)
    )


@pytest.fixture(scope="session")
def tokenizer(sources: Path) -> PreTrainedTokenizerFast:
    return train_tokenizer((document.text for document in collect([sources], ())), VOCAB, CONTEXT)


def strong_model(size: LlamaSize, seed: int) -> Any:
    """Untrained, but not without a will."""
    model = build_model(size, VOCAB, CONTEXT, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10.0 if parameter.ndim > 1 else 1.0)
    return model


@pytest.fixture(scope="session")
def target(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = strong_model(LlamaSize(layers=4, hidden=64, heads=2, kv_heads=1, ffn=64), 5)
    directory = tmp_path_factory.mktemp("models") / "target"
    export_model(model, tokenizer, GenerationConfig(eos_token_id=0, pad_token_id=0), directory)
    return directory


class Watched(PhaseProgress):
    """Progress in a file. A second passes whenever somebody looks at the clock."""

    def __init__(self) -> None:
        self.now, self.written = 0.0, io.StringIO()
        super().__init__(Console(file=self.written), clock=self._tick)

    def _tick(self) -> float:
        self.now += 1.0
        return self.now

    def update(self, *args: Any, **fields: Any) -> None:
        super().update(*args, **fields)
        self.tell()

    @property
    def lines(self) -> list[str]:
        return self.written.getvalue().splitlines()

    @property
    def phases(self) -> list[str]:
        """What the lines are about, each once, in their order."""
        names = [re.split(r" ·|: ", line)[0] for line in self.lines if not line.startswith("at this pace")]
        return list(dict.fromkeys(names))

    @property
    def estimate(self) -> str:
        (line,) = [line for line in self.lines if line.startswith("at this pace")]
        return line

    def counted(self, phase: str, total: str, unit: str) -> int:
        """How many lines tell of a phase all that can be known: done of total, rate, what remains of it and of all."""
        known = rf": [\d,]+ of {total} {unit}, .+ (a second|each), about .+ left, .+ with what follows"
        return sum(re.match(re.escape(phase) + known, line) is not None for line in self.lines)


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture(scope="session")
def tiny(sources: Path) -> PairRecipe:
    text = {"sources": (sources,), "held_out": ("beta",), "vocab_size": VOCAB, "context": 256}
    steps = {"target_tokens": 2560, "draft_tokens": 1536, "sampled_tokens": 128, "checkpoint_every": 4}
    return PairRecipe(**text, target=TINY, draft=TINY, sequence_length=128, batch_rows=2, **steps)


@dataclass(frozen=True)
class FinishedPair:
    folder: Path
    result: Evaluation
    watched: Watched


@pytest.fixture(scope="session")
def finished_pair(tiny: PairRecipe, tmp_path_factory: pytest.TempPathFactory) -> FinishedPair:
    folder, watched = tmp_path_factory.mktemp("finished"), Watched()
    return FinishedPair(folder, train_pair(tiny, folder / "out", folder / "run", watched, "cpu"), watched)
