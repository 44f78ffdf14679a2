"""A recipe small enough to run in seconds, on a handful of made-up packages."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import pilotfish.model  # noqa: F401  # keeps transformers from importing torchao
from pilotfish.progress import PhaseProgress
from pilotfish.train.recipe import LlamaSize, PairRecipe

TINY = LlamaSize(layers=1, hidden=64, heads=2, kv_heads=1, ffn=64)


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
def tiny(sources: Path) -> PairRecipe:
    return PairRecipe(
        sources=(sources,),
        held_out=("beta",),
        vocab_size=300,
        context=256,
        target=TINY,
        draft=TINY,
        sequence_length=96,
        batch_rows=2,
        target_tokens=1920,
        draft_tokens=1152,
        sampled_tokens=96,
        checkpoint_every=4,
    )


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


@pytest.fixture
def watched() -> Watched:
    return Watched()
