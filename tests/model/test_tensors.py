"""What the table of architectures says of weight files is what transformers writes and makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sizes import sized
from support import KINDS, edit_config, edit_tensors, tiny_model, weights, write_model

from pilotfish.engine.pairs import resolve_pair
from pilotfish.model.loading.checkpoint import check_weights, meta_module
from pilotfish.model.loading.configuration import load_config
from pilotfish.model.loading.footprint import footprint
from pilotfish.model.loading.tensors import is_whole, model_weights

CPU = torch.device("cpu")
#: Fields of a configuration that change the tensors of some kinds, and must not change those of others.
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"tie_word_embeddings": True},
    {"attention_bias": True, "mlp_bias": True},
    {"num_key_value_heads": 1, "head_dim": 16},
    {"mlp_only_layers": [1], "moe_intermediate_size": 40},
    {"decoder_sparse_step": 2, "moe_intermediate_size": 40},
)
#: Kinds that are tried with each of them.
ALL_OPTIONS = sized(("llama", "qwen3_moe"), KINDS)


def assert_agreed(directory: Path) -> None:
    config = load_config(directory)
    needed = model_weights(config)
    assert is_whole(directory, config)
    check_weights(directory, config)
    module = meta_module(load_config(directory))
    parts = module.named_modules()
    linears = {f"{name}.weight": tuple(m.weight.shape) for name, m in parts if isinstance(m, torch.nn.Linear)}
    assert {x.name: x.shape for x in needed if x.linear} == linears
    planned = footprint(directory, torch.float32, CPU, eager=True)
    assert planned.parameters == sum(p.numel() for p in module.parameters())
    assert planned.weights == 4 * planned.parameters


@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, each) for kind in KINDS for each in (OPTIONS if kind in ALL_OPTIONS else OPTIONS[:1])],
    ids=str,
)
def test_the_table_is_what_transformers_has(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    tiny_model(kind, **options).save_pretrained(tmp_path)
    assert_agreed(tmp_path)


def test_the_bundled_pair_is_whole() -> None:
    pair = resolve_pair("pycode")
    for directory in (pair.target, pair.draft):
        assert_agreed(directory)


@pytest.mark.parametrize("kind", sized(("llama", "phi3"), KINDS))
def test_a_tensor_that_is_missing_added_or_misshapen_is_not_whole(
    kind: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((tiny_models[kind] / "config.json").read_text())
    config, whole = load_config(tmp_path), weights(tiny_models[kind])
    tensors = load_file(whole)
    for name, tensor in tensors.items():
        others = {other: x for other, x in tensors.items() if other != name}
        for change in ({}, {name: tensor, f"{name}.x": tensor.clone()}, {name: tensor[None]}, {name: tensor.double()}):
            save_file({**others, **change}, tmp_path / whole.name)
            assert not is_whole(tmp_path, config)


def test_a_file_that_is_cut_off_is_not_whole(tmp_path: Path) -> None:
    write_model(tmp_path, "llama")
    config, whole = load_config(tmp_path), weights(tmp_path).read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 9, 0):
        weights(tmp_path).write_bytes(whole[:size])
        assert not is_whole(tmp_path, config)
    weights(tmp_path).write_bytes(whole + b"\0")
    assert not is_whole(tmp_path, config)


def test_a_head_of_another_shape_is_seen_although_it_is_tied(tmp_path: Path) -> None:
    write_model(tmp_path, "llama", tie_word_embeddings=True)
    config = load_config(tmp_path)
    embedding = load_file(weights(tmp_path))["model.embed_tokens.weight"]
    for head, whole in ((embedding.clone(), True), (embedding[1:].clone(), False)):
        edit_tensors(tmp_path, lambda tensors, head=head: tensors.update({"lm_head.weight": head}))
        assert is_whole(tmp_path, config) is whole


@pytest.mark.parametrize(
    "changes",
    [
        {"pad_token_id": 512},
        {"rope_parameters": {"rope_type": "other", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
        {"dtype": "int8"},
        {"max_new_tokens": -1},
        {"attn_implementation": "other"},
        {"experts_implementation": "other"},
    ],
    ids=json.dumps,
)
def test_what_may_keep_transformers_from_making_a_module_is_left_to_it(changes: dict[str, Any], tmp_path: Path) -> None:
    write_model(tmp_path, "llama")
    edit_config(tmp_path, **changes)
    assert not is_whole(tmp_path, load_config(tmp_path))
