"""EAGLE-3 heads in every publisher's layout are read as what they are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from head_files import EAGLE3_DIALECTS, FFN, HEAD_DIM, HEADS, KV_HEADS, change_config, change_tensors, write_eagle3
from safetensors.torch import load_file

from pilotfish.errors import ModelError
from pilotfish.model.heads.families.recurrent import RecurrentHead
from pilotfish.model.heads.files import read_head, read_spec
from pilotfish.model.heads.spec import FINAL, Decoder, HeadSpec, Projection
from pilotfish.model.heads.target import TargetFacts
from pilotfish.model.heads.weights import is_head

IDS = "eagle_aux_hidden_state_layer_ids"


def decoder(**facts: Any) -> Decoder:
    return Decoder(1, 64, HEADS, KV_HEADS, HEAD_DIM, FFN, eps=1e-5, context=2048, **facts)


@pytest.mark.parametrize("dialect", EAGLE3_DIALECTS)
def test_every_dialect_is_read_into_the_same_record(dialect: str, target: TargetFacts, tmp_path: Path) -> None:
    head = write_eagle3(tmp_path, dialect, target=target)
    files = read_head(head, target)
    published = load_file(head / "model.safetensors")
    prefix = "midlayer." if dialect == "safeailab" else "layers.0."
    expected = RecurrentHead(
        Projection((2, 4, 5), 64, eps=1e-5),
        decoder(qk_norm=dialect == "deepspec"),
        "wide",
        residual_normed=dialect == "speculators",
    )
    assert is_head(head)
    # Model-Optimizer's ids (1, 3, 4) are its default for 8 layers, so that nothing is unsure.
    assert files.spec == HeadSpec(expected, "eagle3", dialect, 64, 8, 512)
    assert files.spec == read_spec(head, target)
    assert files.d2t is None
    assert torch.equal(files.tensors["layers.0.self_attn.q_proj.weight"], published[f"{prefix}self_attn.q_proj.weight"])
    assert torch.equal(files.tensors["hidden_norm.weight"], published[f"{prefix}hidden_norm.weight"])
    own = published.get("embed_tokens.weight")
    assert torch.equal(files.tensors["embed_tokens.weight"], target.embedding() if own is None else own)


def test_differences_become_the_targets_ids(target: TargetFacts, tmp_path: Path) -> None:
    head = write_eagle3(tmp_path, "safeailab", target=target, draft_vocab=100)
    files = read_head(head, target)
    listed = load_file(head / "model.safetensors")["t2d"]
    assert files.spec.draft_vocab == 100
    assert files.d2t is not None
    assert torch.equal(files.d2t, listed.nonzero()[:, 0])


def test_a_shared_lm_head_is_the_rows_of_the_heads_vocabulary(target: TargetFacts, tmp_path: Path) -> None:
    head = write_eagle3(tmp_path, "modelopt", target=target, draft_vocab=100)
    change_tensors(head, {"lm_head.weight": None})
    files = read_head(head, target)
    assert files.d2t is not None
    assert torch.equal(files.tensors["lm_head.weight"], target.lm_head()[files.d2t])


def test_a_head_may_be_narrower_than_its_target(target: TargetFacts, tmp_path: Path) -> None:
    head = write_eagle3(tmp_path, "safeailab", target=target, hidden=48)
    files = read_head(head, target)
    assert files.spec.projection.width == 48
    assert files.spec.target_hidden == 64
    change_tensors(head, {"embed_tokens.weight": None})
    with pytest.raises(ModelError, match=r"lacks embed_tokens.weight, and its width of 48 is not its target's, 64"):
        read_head(head, target)


@pytest.mark.parametrize(
    ("fields", "layers", "others"),
    [
        ({}, (2, 4, 5), ()),  # the default
        ({IDS: [1, 4, 6]}, (1, 4, 6), (2, 5, 7)),  # vLLM's, or SGLang's
        ({IDS: [2, 4, 8]}, (2, 4, 8), ()),  # no layer puts out what is after the last
        ({"eagle_config": {IDS: [1, 3, 4]}}, (2, 4, 5), ()),  # the default of those who count outputs
        ({"eagle_config": {IDS: [2, 4, 6]}}, (3, 5, 7), (2, 4, 6)),
        ({"eagle_config": {IDS: [4, 6, 8]}}, (4, 6, 8), ()),
    ],
)
@pytest.mark.parametrize("dialect", ["safeailab", "modelopt"])
def test_layers_of_two_conventions(
    dialect: str,
    fields: dict[str, Any],
    layers: tuple[int, ...],
    others: tuple[int, ...],
    target: TargetFacts,
    tmp_path: Path,
) -> None:
    head = write_eagle3(tmp_path, dialect, target=target)
    change_config(head, **{"eagle_config": None, **fields})
    spec = read_spec(head, target)
    assert spec.projection.layers == layers
    assert spec.other_layers == others
    told = read_spec(head, target, layers=(0, 3, FINAL))
    assert (told.projection.layers, told.other_layers) == ((0, 3, FINAL), ())


def test_speculators_count_what_a_layer_gets(target: TargetFacts, tmp_path: Path) -> None:
    spec = read_spec(write_eagle3(tmp_path, target=target, layers=(1, 3, 8)), target)
    assert (spec.projection.layers, spec.other_layers) == ((1, 3, 8), ())


def test_deepspec_counts_what_a_layer_puts_out_and_may_take_the_embeddings(target: TargetFacts, tmp_path: Path) -> None:
    head = write_eagle3(tmp_path, "deepspec", target=target, layers=(0, 1, 2, 3, 8))
    assert read_spec(head, target).projection.layers == (0, 1, 2, 3, FINAL)


@pytest.mark.parametrize("name", ["norm_before_fc", "fc_norm"])
@pytest.mark.parametrize("dialect", ["safeailab", "speculators"])
def test_norms_before_fc(name: str, dialect: str, target: TargetFacts, tmp_path: Path) -> None:
    files = read_head(write_eagle3(tmp_path, dialect, target=target, **{name: True}), target)
    projection = files.spec.projection
    assert (projection.joined_norm, projection.part_norms) == (name == "norm_before_fc", name == "fc_norm")
    norms = ["input_norm.weight"] if name == "norm_before_fc" else [f"fc_norm.{i}.weight" for i in range(3)]
    assert all(norm in files.tensors for norm in norms)


@pytest.mark.parametrize(
    ("dialect", "fields", "residual", "recycled"),
    [
        ("safeailab", {}, False, False),
        ("safeailab", {"norm_output": True}, False, False),  # only says that a norm comes before lm_head
        ("safeailab", {"norm_before_residual": True}, True, False),
        ("speculators", {"norm_before_residual": None}, True, False),  # as vLLM takes it
        ("speculators", {"norm_before_residual": False}, False, False),
        ("speculators", {"norm_output": True}, True, True),
        ("modelopt", {"norm_output": True}, False, True),
        ("deepspec", {}, False, False),
    ],
)
def test_residual_and_recycled_state(
    dialect: str, fields: dict[str, Any], residual: bool, recycled: bool, target: TargetFacts, tmp_path: Path
) -> None:
    head = write_eagle3(tmp_path, dialect, target=target)
    change_config(head, **fields)
    spec = read_spec(head, target)
    assert isinstance(spec.head, RecurrentHead)
    assert (spec.head.residual_normed, spec.head.recycles_normed) == (residual, recycled)


def test_the_rope_is_the_heads_own(target: TargetFacts, tmp_path: Path) -> None:
    def rope(**fields: Any) -> Any:
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        spec = read_spec(write_eagle3(directory, "safeailab", target=target, **fields), target)
        assert isinstance(spec.head, RecurrentHead)
        return spec.head.decoder.rope

    plain = {"rope_type": "default", "rope_theta": 10000.0}
    assert rope() == plain
    assert rope(rope_theta=500000) == {**plain, "rope_theta": 5e5}
    assert rope(rope_theta=1e4, rope_parameters={"rope_theta": 1e6, "rope_type": "default"})["rope_theta"] == 1e6
    yarn = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 128}
    read = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 16.0, "original_max_position_embeddings": 128}
    assert rope(rope_theta=5e4, rope_scaling=yarn) == read
    assert rope(partial_rotary_factor=0.5) == {**plain, "partial_rotary_factor": 0.5}


def test_windows_are_those_of_layer_types(target: TargetFacts, tmp_path: Path) -> None:
    head = write_eagle3(tmp_path, "safeailab", target=target, sliding_window=64)
    assert read_spec(head, target).head.decoder.window == 0  # type: ignore[union-attr]
    change_config(head, layer_types=["sliding_attention"])
    assert read_spec(head, target).head.decoder.window == 64  # type: ignore[union-attr]


def test_a_head_without_fc_takes_the_final_state(target: TargetFacts, tmp_path: Path) -> None:
    head = write_eagle3(tmp_path, "modelopt", target=target)
    change_config(head, eagle_config={"use_aux_hidden_state": False})
    change_tensors(head, {"fc.weight": None})
    projection = read_spec(head, target).projection
    assert (projection.layers, projection.fc, projection.width) == ((FINAL,), False, 64)


def test_the_digest_is_that_of_what_makes_features(target: TargetFacts, tmp_path: Path) -> None:
    head = write_eagle3(tmp_path / "a", "safeailab", target=target)
    digest = read_head(head, target).digest
    assert read_head(head, target).digest == digest
    # Another publisher's layout of the same projection.
    other = write_eagle3(tmp_path / "b", "speculators", target=target)
    change_tensors(other, {"fc.weight": load_file(head / "model.safetensors")["fc.weight"]})
    assert read_head(other, target).digest == digest
    change_tensors(other, {"norm.weight": torch.ones(64)})
    assert read_head(other, target).digest == digest
    assert read_head(other, target, layers=(2, 3, 5)).digest != digest
    change_tensors(other, {"fc.weight": torch.ones(64, 192)})
    assert read_head(other, target).digest != digest
