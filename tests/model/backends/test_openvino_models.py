"""What OpenVINO runs: models of each architecture without windows, also on a device that takes fixed sizes alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from backend_rig import Traffic, compare, own
from sizes import sized
from support import DENSE, VOCAB, write_model

pytest.importorskip("openvino")
from pilotfish.errors import ModelError, ParameterError
from pilotfish.model.backends.openvino_executor import OpenVINOExecutor, Sizes

#: Where a tiny model's own configuration has windows.
NO_WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "phi3": {"sliding_window": None},
    **{name: {"layer_types": ["full_attention"] * 2} for name in ("qwen3", "gemma2", "gemma3_text")},
}


def made(directory: Path, sizes: Sizes | None = None, device: str = "CPU") -> OpenVINOExecutor:
    return OpenVINOExecutor(directory, device, "float32", 512, 1, VOCAB, sizes)


@pytest.mark.parametrize("kind", sized(("gemma2",), DENSE))
def test_architectures(kind: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path, kind, **NO_WINDOWS.get(kind, {}))
    compare(made(directory), own(512, directory), Traffic(4, vocab=VOCAB), 25)


def test_fixed_sizes_give_the_same_logits(tmp_path: Path) -> None:
    """As on an NPU: rows and earlier tokens are padded, and what is more than the largest size goes in several."""
    directory = write_model(tmp_path, "qwen2")
    executor = made(directory, Sizes((4, 9), (24, 75)))
    assert (executor.context, executor.padded(3), executor.padded(5)) == (75, 4, 9)
    compare(executor, own(512, directory), Traffic(6, vocab=VOCAB), 40)


def test_bfloat16_is_near(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "llama")
    theirs = OpenVINOExecutor(directory, "CPU", "bfloat16", 512, 1, VOCAB)
    ours = own(512, directory)
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
