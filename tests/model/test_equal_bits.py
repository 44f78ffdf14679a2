"""What a start finds out about the device: whether a row has the same bits in any company."""

import logging
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from recording import as_on_a_card
from support import KINDS, make_engine

from pilotfish.engine import engine as engines
from pilotfish.engine.memory import device_named
from pilotfish.errors import ParameterError
from pilotfish.model import devices
from pilotfish.model.batch import Forwarded
from pilotfish.model.devices import kernels_of
from pilotfish.model.exactness import COMPANY, PROMPT, note_company, unequal_companies
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.loading.loader import load_model
from pilotfish.model.sampling import PERTURBED

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class ByCompany(TorchExecutor):
    """Other bits among more rows than 16."""

    def run(self, batches: Any) -> Forwarded:
        logits = super().run(batches).logits
        return Forwarded(logits + 1e-6 if sum(len(batch.input_ids) for batch in batches) > 16 else logits)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_of_the_processor_pass(kind: str, tiny_models: dict[str, Path]) -> None:
    assert unequal_companies(TorchExecutor(load_model(tiny_models[kind], torch.float32, CPU, eager=False), 400)) == []


@pytest.mark.parametrize("slots", [400, PROMPT + 40])
def test_other_bits_are_found(slots: int, llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With few slots in less company."""
    executor = ByCompany(load_model(llama, torch.float32, CPU, eager=False), slots)
    assert unequal_companies(executor) == [PROMPT + 1, *(count for count in COMPANY if count > 16)]
    assert not note_company(executor)
    assert "a row has other bits among 33, 64, 256, 512 rows than alone" in caplog.text


def test_equal_bits_are_told(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert note_company(TorchExecutor(load_model(llama, torch.float32, CPU, eager=False), 400))
    assert "equal bits: a row alone and among up to 512 rows" in caplog.text


# -- devices whose kernels do not run


@pytest.mark.parametrize("fails", ["execute", "note_company", "record_forwards"])
def test_a_kernel_that_does_not_run_leaves_the_reference_and_no_promise(
    fails: str, llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    as_on_a_card(monkeypatch)
    monkeypatch.setattr(TorchExecutor if fails == "execute" else engines, fails, lambda *_: 1 / 0)
    engine = make_engine(llama)
    assert engine.config.eager and not engine.executor.model.native and not engine.exact
    [line] = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert line.endswith("--eager is used for the target, without a promise: division by zero")
    assert "cuda" not in PERTURBED


@pytest.mark.parametrize(
    ("capability", "head_dim", "expected"),
    [
        ((7, 5), 64, "a GPU of capability 8.0 or more, or --eager; this has 7.5"),
        ((9, 0), 512, "--eager for heads of"),
        ((9, 0), 64, "Triton beside PyTorch, or --eager; here: import of triton"),
    ],
)
def test_what_no_kernel_takes_is_refused(
    capability: tuple[int, int], head_dim: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(devices, "use_reproducible_products", lambda: None)
    monkeypatch.setitem(sys.modules, "triton.errors", None)
    monkeypatch.delitem(sys.modules, "pilotfish.model.cuda.kernels", raising=False)
    with pytest.raises(ParameterError, match=f"^device: 'cuda' is not allowed; expected {expected}"):
        kernels_of(CUDA, head_dim, eager=False)
    assert kernels_of(CUDA, head_dim, eager=True).device == CUDA


def test_bfloat16_on_a_processor_promises_nothing(llama: Path) -> None:
    assert not make_engine(llama, dtype="bfloat16").exact


def test_a_driver_says_why_there_is_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=RuntimeError("The driver is too old.\nGet another")))
    with pytest.raises(ParameterError, match=r"^draft_device: 'cuda' is not .*; here: The driver is too old\.$"):
        device_named("cuda", "draft_device")
