"""DFlash and DSpark heads in every publisher's layout are read as what they are."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from head_files import BLOCK, BLOCK_DIALECTS, FFN, HEAD_DIM, HEADS, KV_HEADS, MASK, change_config, write_block
from safetensors.torch import load_file, save_file

from pilotfish.model.heads.families.block import BlockHead
from pilotfish.model.heads.files import read_head, read_spec
from pilotfish.model.heads.spec import FINAL, Decoder, HeadSpec, Projection
from pilotfish.model.heads.target import TargetFacts
from pilotfish.model.heads.weights import is_head


def block(head: Path, target: TargetFacts) -> BlockHead:
    found = read_spec(head, target).head
    assert isinstance(found, BlockHead)
    return found


def expected(**facts: Any) -> BlockHead:
    decoder = Decoder(2, 64, HEADS, KV_HEADS, HEAD_DIM, FFN, eps=1e-5, context=2048, qk_norm=True)
    projection = Projection((2, 4, 6), 64, feature_norm=True, eps=1e-5)
    return BlockHead(projection, decoder, BLOCK, MASK, **facts)


@pytest.mark.parametrize("dialect", BLOCK_DIALECTS)
def test_dspark_in_every_dialect(dialect: str, target: TargetFacts, tmp_path: Path) -> None:
    head = write_block(tmp_path, "dspark", dialect, target=target, gated=True)
    files, published = read_head(head, target), load_file(tmp_path / "model.safetensors")
    facts = expected(anchored=True, markov_rank=16, markov="gated", confidence="markov")
    assert is_head(head)
    assert files.spec == HeadSpec(facts, "dspark", dialect, 64, 8, 512)
    for ours, theirs in (
        ("feature_norm.weight", "hidden_norm.weight"),
        ("markov.w1.weight", "markov_head.markov_w1.weight"),
        ("markov.w2.weight", "markov_head.markov_w2.weight"),
        ("markov.gate.bias", "markov_head.gate_proj.bias"),
        ("confidence.weight", "confidence_head.proj.weight"),
        ("layers.1.self_attn.k_norm.weight", "layers.1.self_attn.k_norm.weight"),
    ):
        assert torch.equal(files.tensors[ours], published[theirs])
    own = published.get("embed_tokens.weight")
    assert torch.equal(files.tensors["embed_tokens.weight"], target.embedding() if own is None else own)


@pytest.mark.parametrize("dialect", BLOCK_DIALECTS)
def test_dflash_in_every_dialect(dialect: str, target: TargetFacts, tmp_path: Path) -> None:
    spec = read_spec(write_block(tmp_path, "dflash", dialect, target=target), target)
    anchored = dialect == "deepspec"  # its DFlash is a DSpark without a Markov head
    kind = "dspark" if anchored else "dflash"
    assert spec == HeadSpec(expected(anchored=anchored), kind, dialect, 64, 8, 512)


def test_a_reduced_vocabulary(target: TargetFacts, tmp_path: Path) -> None:
    head = write_block(tmp_path, target=target, draft_vocab=100)
    files = read_head(head, target)
    assert files.d2t is not None
    assert files.tensors["markov.w1.weight"].shape == (512, 16)
    assert files.tensors["markov.w2.weight"].shape == (100, 16)


@pytest.mark.parametrize(
    ("dialect", "fields", "anchored"),
    [
        ("speculators", {"sample_from_anchor": None}, True),
        ("speculators", {"sample_from_anchor": False}, False),
        ("z-lab", {}, True),
    ],
)
def test_anchors(dialect: str, fields: dict[str, Any], anchored: bool, target: TargetFacts, tmp_path: Path) -> None:
    head = write_block(tmp_path, "dspark", dialect, target=target)
    change_config(head, **fields)
    assert block(head, target).anchored == anchored


def test_model_optimizers_names_and_fields(target: TargetFacts, tmp_path: Path) -> None:
    head = write_block(tmp_path, "dspark", "z-lab", target=target)
    tensors = load_file(tmp_path / "model.safetensors")
    flat = {
        name.replace("markov_head.", "").replace("confidence_head.proj", "confidence_proj"): tensors[name]
        for name in tensors
    }
    save_file(flat, tmp_path / "model.safetensors")
    inner = {"mask_token_id": MASK, "target_layer_ids": [1, 3, 5], "projector_type": "dspark"}
    inner |= {"markov_rank": 16, "markov_head_type": "vanilla", "use_confidence_head": True, "causal": True}
    for shifted in (True, False):
        change_config(head, dflash_config={**inner, "shift_label": shifted})
        facts = {"markov_rank": 16, "confidence": "markov", "causal": True}
        assert block(head, target) == expected(anchored=shifted, **facts)


def test_early_names_of_specforge(target: TargetFacts, tmp_path: Path) -> None:
    head = write_block(tmp_path, "dspark", "z-lab", target=target)
    tensors = load_file(tmp_path / "model.safetensors")
    heads = ("markov_head", "confidence_head")
    save_file(
        {f"logit_head.{name}" if name.startswith(heads) else name: x for name, x in tensors.items()},
        tmp_path / "model.safetensors",
    )
    change_config(
        head, dflash_config={"mask_token_id": MASK, "target_layer_ids": [1, 3, 5]}, dspark_config={"markov_rank": 16}
    )
    assert block(head, target) == expected(anchored=True, markov_rank=16, confidence="markov")


SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 32}
SWA = {"use_swa": True, "swa_window_size": 32, "causal": False}


@pytest.mark.parametrize(
    ("dialect", "fields", "window", "causal"),
    [
        ("z-lab", {}, 0, False),
        ("z-lab", SLIDING, 32, True),
        ("z-lab", {**SLIDING, "is_causal": False}, 32, False),
        ("z-lab", {"is_causal": True}, 0, True),
        ("z-lab", {"sliding_window": 32, "dflash_config": SWA}, 32, False),
        ("speculators", SLIDING, 32, True),
        ("speculators", {**SLIDING, "sliding_window_non_causal": True}, 32, False),
    ],
)
def test_windows_and_causality(
    dialect: str, fields: dict[str, Any], window: int, causal: bool, target: TargetFacts, tmp_path: Path
) -> None:
    head = write_block(tmp_path, "dflash", dialect, target=target)
    if dialect == "speculators":
        inner = {name: x for name, x in fields.items() if name != "sliding_window_non_causal"}
        fields = {**fields, "transformer_layer_config": {**block_fields(head)["transformer_layer_config"], **inner}}
        fields = {name: x for name, x in fields.items() if name not in inner}
    elif "dflash_config" in fields:
        fields = {**fields, "dflash_config": {**block_fields(head)["dflash_config"], **fields["dflash_config"]}}
    change_config(head, **fields)
    found = block(head, target)
    assert (found.decoder.window, found.causal) == (window, causal)


def block_fields(head: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((head / "config.json").read_text())
    return fields


@pytest.mark.parametrize(("depth", "layers"), [(1, (5,)), (2, (2, 6)), (3, (2, 4, 6))])
def test_zlabs_default_layers(depth: int, layers: tuple[int, ...], target: TargetFacts, tmp_path: Path) -> None:
    head = write_block(tmp_path, "dflash", "z-lab", target=target, depth=depth, layers=layers)
    change_config(head, dflash_config={"mask_token_id": MASK})
    assert block(head, target).projection.layers == layers


def test_the_last_output_is_the_final_state_where_transformers_made_it(target: TargetFacts, tmp_path: Path) -> None:
    layers = (1, 4, 8)
    theirs = block(write_block(tmp_path / "a", "dflash", "z-lab", target=target, layers=layers), target)
    ours = block(write_block(tmp_path / "b", "dflash", "speculators", target=target, layers=layers), target)
    assert theirs.projection.layers == (1, 4, FINAL)
    assert ours.projection.layers == (1, 4, 8)
