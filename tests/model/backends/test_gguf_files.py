"""llama.cpp computes what transformers computes, from files that we wrote of the same weights. Skipped where it is not
installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support import write_model
from transformers import AutoModelForCausalLM

from pilotfish.config.fields import GGUFWeights
from pilotfish.errors import ModelError

pytest.importorskip("gguf")
from pilotfish.model.backends.gguf_file import gguf_of

TOKENS = [7, 99, 250, 3, 41, 41, 180, 7, 99, 250]
ALLOWED = {"qwen3": {"use_sliding_window": False, "layer_types": ["full_attention", "full_attention"]}}


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = request.param
    return write_model(tmp_path_factory.mktemp(kind), kind, head_dim=16, **ALLOWED.get(kind, {}))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))


def logits_of(model: Path) -> np.ndarray:
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        return reference(torch.tensor([TOKENS])).logits[0].numpy()


@pytest.mark.parametrize(("weights", "error"), [("f32", 1e-4), ("f16", 0.02), ("bf16", 0.15)])
def test_llama_cpp_has_transformers_logits(model: Path, weights: GGUFWeights, error: float) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    kind = llama_cpp.GGML_TYPE_F32
    options = {"n_ctx": 64, "n_threads": 1, "logits_all": True, "verbose": False, "type_k": kind, "type_v": kind}
    llama = llama_cpp.Llama(str(gguf_of(model, weights)), **options)
    llama.eval(TOKENS)
    got, expected = llama.scores[: len(TOKENS)], logits_of(model)
    assert np.abs(got - expected).max() < error * np.abs(expected).max()
    norms = np.linalg.norm(got, axis=-1) * np.linalg.norm(expected, axis=-1)
    assert ((got * expected).sum(axis=-1) / norms).min() > 1 - error


def test_a_model_is_converted_once(model: Path) -> None:
    first = gguf_of(model, "bf16")
    written = first.stat().st_mtime_ns
    assert gguf_of(model, "bf16") == first and first.stat().st_mtime_ns == written
    assert gguf_of(model, "f32") != first and len(list(first.parent.glob("*.gguf"))) == 2


@pytest.mark.parametrize(
    ("kind", "reason"), [("mistral", "sliding windows"), ("qwen3", "sliding windows"), ("gemma2", "model type gemma2")]
)
def test_what_is_not_converted(kind: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=reason):
        gguf_of(write_model(tmp_path / kind, kind), "f32")
