"""What the table of architectures says of weight files is what transformers writes and makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sizes import sized
from support import KINDS, tiny_model

from pilotfish.engine.pairs import resolve_pair
from pilotfish.model.loading.checkpoint import check_weights, meta_module
from pilotfish.model.loading.configuration import load_config
from pilotfish.model.loading.footprint import footprint
from pilotfish.model.loading.tensors import model_weights

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
