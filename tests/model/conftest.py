"""Fixtures of tests that run the C++ kernels."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pilotfish.model.cpu.native import load_kernels


@pytest.fixture(scope="session")
def kernels() -> None:
    assert load_kernels(), "these tests need a C++ compiler"


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    """Of a model's directory."""
    return Path(shutil.copytree(llama, tmp_path / "model"))
