"""Fixtures of all tests. Threads wait passively: tests share cores with whatever else runs."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sizes import sized

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined
import slim_imports  # noqa: F401  # comes before whatever imports transformers' models
from hypothesis import settings
from permuted_models import permuted
from support import KINDS, write_model
from xdist.scheduler import LoadFileScheduling

from pilotfish.kv import tiers
from pilotfish.kv.tiers import KVTiers

# Where this is switched off, as in many containers, each process compiles the package anew, and pytest all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

settings.register_profile("pilotfish", deadline=None, derandomize=True, database=None, max_examples=sized(30, 50))
settings.load_profile("pilotfish")


#: How the names of files begin that share answers of live servers or parsed sources, or that must not run at once:
#: these look for each other's sandboxed processes.
SHARING = (
    ("tests/cli/bench/test_sandbox", "tests/cli/bench/test_parity", "tests/cli/bench/test_tasks"),
    ("tests/server/test_openai_", "tests/server/test_messages_live"),
    ("tests/test_house", "tests/test_layers"),
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """Of the processes of `make test`, one runs all tests of a file, and of files that share servers."""
    return _Scheduling(config, log)


class _Scheduling(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(("tests/soak/test_whole_files", "tests/gpu")):  # each test runs a file of its own, or long
            return nodeid
        return next((names[0] for names in SHARING if nodeid.startswith(names)), super()._split_scope(nodeid))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Runs tests that are coroutines, which `pytest.mark.anyio` marks."""
    return "asyncio"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Each test begins and ends with one thread, whatever an engine in it has set."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Commands configure the whole process's log: a handler of one test would write to a stream that is closed."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def patient_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV in a tier is loaded, however long it takes: what depends on time is tested in tests/kv."""
    monkeypatch.setattr(KVTiers, "computed", lambda *_: None)
    for name in ("STUCK", "LEAST"):
        monkeypatch.setattr(tiers, name, 1000.0)


@pytest.fixture
def foreign_lines() -> Iterator[list[str]]:
    """What transformers logs meanwhile, at its usual level."""
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("transformers")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    return write_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3."""
    return write_model(tmp_path_factory.mktemp("qwen3"), "qwen3", seed=1)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny random model of every architecture that is served."""
    return {kind: write_model(tmp_path_factory.mktemp(kind), kind, seed=2) for kind in KINDS}


@pytest.fixture(scope="session")
def tiny_drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each of `tiny_models` a draft of its architecture that is often right about it."""
    return {kind: write_model(tmp_path_factory.mktemp(kind), kind, seed=2, perturbed=0.05) for kind in KINDS}


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that is often right about `llama`."""
    return write_model(tmp_path_factory.mktemp("draft"), "llama", perturbed=0.05)


@pytest.fixture(scope="session")
def other_ids(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`llama` with its tokens under other ids."""
    return permuted(llama, tmp_path_factory.mktemp("permuted"))
