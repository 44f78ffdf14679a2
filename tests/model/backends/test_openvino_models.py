"""What OpenVINO runs: models of each architecture without windows. In the suite the bundled draft (`test_backends`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_rig import Traffic, compare, own
from sizes import in_soak
from support import DENSE, VOCAB, write_model

pytest.importorskip("openvino")
from pilotfish.errors import ModelError, ParameterError
from pilotfish.model.backends import openvino_executor, openvino_model
from pilotfish.model.backends.openvino_executor import OpenVINOExecutor
from pilotfish.model.loading.loader import load_model

#: Where a tiny model's own configuration has windows.
NO_WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "phi3": {"sliding_window": None},
    **{name: {"layer_types": ["full_attention"] * 2} for name in ("qwen3", "gemma2", "gemma3_text")},
}


def made(directory: Path, dtype: str = "float32", device: str = "CPU") -> OpenVINOExecutor:
    return OpenVINOExecutor(directory, device, dtype, 512, 1, VOCAB)


@pytest.fixture(scope="module", params=DENSE)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of a model that is converted once, which takes seconds."""
    model = write_model(tmp_path_factory.mktemp("model"), request.param, **NO_WINDOWS.get(request.param, {}))
    converted = openvino_model.converted(load_model(model, torch.float32, torch.device("cpu"), eager=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openvino_executor, "converted", lambda _: converted)
        yield model


@in_soak
def test_architectures(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In forwards of few rows: what is more goes in several."""
    monkeypatch.setattr(openvino_executor, "MOST_ROWS", 9)
    compare(made(directory), own(512, directory), Traffic(6, vocab=VOCAB), 25)


@in_soak
def test_bfloat16_is_near(directory: Path) -> None:
    theirs, ours = made(directory, "bfloat16"), own(512, directory)
    for forward in Traffic(2, vocab=VOCAB).forwards(10):
        found, expected = theirs.logits(forward), ours.forward(forward)
        assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.99


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="sliding windows; backend openvino has no such layers"):
        made(write_model(tmp_path / "windows", "mistral"))
    with pytest.raises(ModelError, match="experts or dynamic rotary embeddings; backend openvino has neither"):
        made(write_model(tmp_path / "experts", "qwen3_moe"))
    with pytest.raises(ParameterError, match="backend_device: 'TPU' is not allowed; expected one of CPU"):
        made(write_model(tmp_path / "plain", "llama"), device="TPU")
