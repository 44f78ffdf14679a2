"""Model directories that cannot be served are refused in one line that says why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import CONTEXT, VOCAB, WINDOW, native_model, tiny_model

from pilotfish.errors import ModelError
from pilotfish.model.features import LayerGroup
from pilotfish.model.loader import load_model
from pilotfish.model.tokenizer import load_tokenizer


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))


def refusal(directory: Path) -> str:
    """The one line that `load_model` raises."""
    with pytest.raises(ModelError) as caught:
        load_model(directory, torch.float32, torch.device("cpu"), eager=True)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def weights(directory: Path) -> Path:
    (path,) = directory.glob("*.safetensors")
    return path


def test_the_shape_of_a_model(llama: Path) -> None:
    model = native_model(llama)
    shape = model.shape
    assert (shape.vocab_size, shape.context, shape.layers, shape.kv_heads, shape.head_dim) == (VOCAB, CONTEXT, 2, 2, 32)
    assert model.generation.eos_ids == frozenset()


@pytest.mark.parametrize(("value", "expected"), [(3, {3}), ([3, 5], {3, 5})])
def test_end_of_sequence_ids(copy: Path, value: object, expected: set[int]) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert load_model(copy, torch.float32, torch.device("cpu"), eager=True).generation.eos_ids == expected


def test_a_missing_directory(tmp_path: Path) -> None:
    assert "config.json" in refusal(tmp_path / "nothing")


def test_missing_weights(copy: Path) -> None:
    weights(copy).unlink()
    assert "no safetensors weights" in refusal(copy)


@pytest.mark.parametrize("keep", [0, 5, 1000, 20_000])
def test_truncated_weights(copy: Path, keep: int) -> None:
    weights(copy).write_bytes(weights(copy).read_bytes()[:keep])
    assert "cannot be loaded" in refusal(copy)


def test_garbage_for_weights(copy: Path) -> None:
    weights(copy).write_bytes(b"\xff" * 4096)
    assert "cannot be loaded" in refusal(copy)


def test_a_missing_tensor(copy: Path) -> None:
    tensors = load_file(weights(copy))
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights(copy), metadata={"format": "pt"})
    assert "lacks 1 tensors" in refusal(copy)


def test_a_tensor_of_another_shape(copy: Path) -> None:
    tensors = load_file(weights(copy))
    tensors["model.norm.weight"] = torch.ones(63)
    save_file(tensors, weights(copy), metadata={"format": "pt"})
    assert str(copy) in refusal(copy)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"model_type": "no-such-model"}', '{"model_type": "llama", "hidden_size": "wide"}']
)
def test_a_corrupt_config(copy: Path, text: str) -> None:
    (copy / "config.json").write_text(text)
    assert str(copy) in refusal(copy)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("gemma3", "Gemma3ForConditionalGeneration"),
        ("llama4_text", "Llama4ForCausalLM"),
        ("gpt2", "GPT2LMHeadModel"),
        ("bert", "BertModel"),
    ],
)
def test_other_architectures_are_named(copy: Path, model_type: str, name: str) -> None:
    edit_config(copy, model_type=model_type, architectures=[name])
    message = refusal(copy)
    assert name in message
    assert "LlamaForCausalLM" in message


@pytest.mark.parametrize(("window", "seen"), [(None, 0), (CONTEXT, 0), (CONTEXT - 1, CONTEXT - 1), (WINDOW, WINDOW)])
def test_a_window_that_no_sequence_outgrows_is_none(tmp_path: Path, window: int | None, seen: int) -> None:
    tiny_model("mistral", sliding_window=window).save_pretrained(tmp_path)
    assert native_model(tmp_path).shape.groups == (LayerGroup(seen, (0, 1)),)


def test_layers_are_grouped_by_window(tiny_models: dict[str, Path]) -> None:
    groups = {kind: native_model(path).shape.groups for kind, path in tiny_models.items()}
    for kind in ("llama", "qwen2", "qwen3_moe", "olmo2"):
        assert groups[kind] == (LayerGroup(0, (0, 1)),)
    for kind in ("mistral", "mixtral", "phi3"):
        assert groups[kind] == (LayerGroup(WINDOW, (0, 1)),)
    for kind in ("qwen3", "gemma2", "gemma3_text", "gpt_oss"):
        assert groups[kind] == (LayerGroup(0, (1,)), LayerGroup(WINDOW, (0,)))


LONGROPE = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "original_max_position_embeddings": 64}
ROPES: dict[str, dict[str, Any]] = {
    "longrope": {"rope_type": "longrope", "rope_theta": 1e4, **LONGROPE},
    "partial_rotary_factor": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ("qwen3", {"use_sliding_window": False}, "no sliding_window"),
        ("mistral", {"sliding_window": 0}, "sliding_window of 0"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        # angles that depend on the longest sequence of a batch
        ("llama", {"rope_parameters": ROPES["longrope"]}, "longrope"),
        ("gemma3_text", {"rope_parameters": {"full_attention": ROPES["longrope"]}}, "longrope"),
        ("llama", {"rope_parameters": ROPES["partial_rotary_factor"]}, "partial_rotary_factor of 0.5"),
        ("llama", {"hidden_act": "gelu"}, "activation gelu"),
        ("llama", {"model_type": "mistral"}, "model_type mistral"),
        ("gemma2", {"hidden_activation": "relu"}, "activation relu"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "fp8"),
    ],
)
def test_what_would_be_served_wrong_is_refused(
    tiny_models: dict[str, Path], tmp_path: Path, kind: str, changes: dict[str, Any], named: str
) -> None:
    copy = Path(shutil.copytree(tiny_models[kind], tmp_path / "model"))
    edit_config(copy, **changes)
    message = refusal(copy)
    assert named in message
    assert str(copy) in message


def test_a_corrupt_generation_config(copy: Path) -> None:
    (copy / "generation_config.json").write_text("{")
    assert "generation_config.json" in refusal(copy)


@pytest.mark.parametrize("text", [None, "{"])
def test_a_tokenizer_that_cannot_be_loaded(copy: Path, text: str | None) -> None:
    path = copy / "tokenizer.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ModelError, match="tokenizer") as caught:
        load_tokenizer(copy)
    assert "\n" not in str(caught.value)
