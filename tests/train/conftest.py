"""A recipe small enough to run in seconds, on a handful of made-up packages."""

from pathlib import Path

import pytest

import pilotfish.model  # noqa: F401  # keeps transformers from importing torchao
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
