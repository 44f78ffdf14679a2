"""Heads that are not what their configuration says, or not of this target, are refused in one line that says why."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from head_files import (
    EAGLE3_DIALECTS,
    PEAGLE_DIALECTS,
    change_config,
    change_tensors,
    refusal,
    write_block,
    write_eagle1,
    write_eagle3,
    write_medusa,
    write_mtp,
    write_peagle,
    write_target,
)

from pilotfish.errors import ModelError, ParameterError
from pilotfish.model.heads.files import read_head, read_spec
from pilotfish.model.heads.target import TargetFacts
from pilotfish.model.heads.weights import is_head

Fields = dict[str, Any]
WRITERS: dict[str, Callable[..., Path]] = {"eagle3": write_eagle3, "peagle": write_peagle, "dspark": write_block}
IDS = "eagle_aux_hidden_state_layer_ids"
PROPOSALS = "speculators_config.proposal_methods"
WINDOWED = {"layer_types": ["sliding_attention"]}
#: Of a kind's layout: fields of its configuration, and what is said of them.
FIELDS: dict[tuple[str, str], list[tuple[Fields, str]]] = {
    ("eagle3", "safeailab"): [
        ({"vocab_size": 511}, "is of a vocabulary of 511; its target"),
        ({"target_hidden_size": 80}, "is of a target of hidden size 80"),
        ({"draft_vocab_size": 513}, "draft_vocab_size: 513 is not allowed; expected at most 512"),
        ({"sliding_chunk": 3}, "sliding_chunk: 3 is not allowed; expected no such field"),
        ({"hidden_act": "relu"}, "hidden_act: 'relu' is not allowed; expected one of silu"),
        ({"hidden_size": "64"}, "hidden_size: '64' is not allowed; expected an integer"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers: 1099511627776 is not allowed; expected at most 256"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 is not allowed; expected a divisor of 4"),
        ({"mlp_bias": True}, "mlp_bias: True is not allowed"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type: 'longrope' is not allowed"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: None is not allowed; expected a number above 0"),
        ({"rope_theta": 1}, "rope_theta: 1 is not allowed; expected a number above 1"),
        ({"partial_rotary_factor": 1 << 70}, "partial_rotary_factor: 1180591620717411303424 is not allowed"),
        ({"partial_rotary_factor": 0.01}, "partial_rotary_factor: 0.01 is not allowed"),
        ({"use_sliding_window": True, "max_window_layers": "x"}, "max_window_layers: 'x' is not allowed"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window: None is not allowed"),
        ({"layer_types": ["linear_attention"]}, "layer_types: ['linear_attention'] is not allowed"),
        ({IDS: [1, 2, 9]}, f"{IDS}: [1, 2, 9] is not allowed; expected layers 0 to 8"),
        ({IDS: [1, 1, 2]}, f"{IDS}: [1, 1, 2] is not allowed; expected a list without repetitions"),
        ({IDS: [1, 4], "eagle_config": {IDS: [1, 4]}}, f"eagle_config.{IDS}: [1, 4] is not allowed; expected only"),
        ({"norm_before_fc": True}, "lacks tensor input_norm.weight"),
        ({"norm_before_fc": True, "fc_norm": True}, "fc_norm: True is not allowed; expected false beside norm_before"),
        ({"norm_output": False}, "norm_output: False is not allowed"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "eagle_config.parallel_draft_step: 4 is not allowed"),
    ],
    ("peagle", "speculators"): [
        ({"mask_token_id": None}, "names no token of its mask: mask_token_id in"),
        ({"mask_token_id": 512}, "mask_token_id: 512 is not allowed; expected at most 511"),
        ({"speculators_model_type": "eagle3"}, "'eagle3' is not allowed; expected one of peagle"),
        ({"speculators_config": {}}, f"{PROPOSALS}: None is not allowed; expected a list"),
        (
            {"speculators_config": {"proposal_methods": [{"speculative_tokens": 1}]}},
            f"{PROPOSALS}[0].speculative_tokens: 1 is not allowed; expected an integer of at least 2",
        ),
        ({"pard_token": 3}, "pard_token: 3 is not allowed; expected no such field in a head of peagle"),
    ],
    ("peagle", "vllm"): [
        ({"pard_token": 3}, "ptd_token_id: 500 is not allowed; expected 3, as pard_token says"),
        ({"parallel_drafting": False}, "parallel_drafting: False is not allowed; expected True"),
        ({"num_depths": 1 << 40}, "num_depths: 1099511627776 is not allowed; expected at most 256"),
        ({**WINDOWED, "sliding_window": 3}, "has a window of 3, less than the 4 tokens of a forward"),
        ({"eagle_config": {"next_layer_regular": False, "x": 1}}, "eagle_config.x: 1 is not allowed"),
    ],
    ("dspark", "speculators"): [
        ({"speculators_model_type": "dflash2"}, "speculators_model_type: 'dflash2' is not allowed"),
        ({"mask_token_id": 512}, "has a mask_token_id of 512; its target's vocabulary is 512"),
        ({"mask_token_id": float("nan")}, "mask_token_id: nan is not allowed"),
        ({"block_size": 1}, "block_size: 1 is not allowed; expected an integer of at least 2"),
        ({"aux_hidden_state_layer_ids": None}, "names no layers of its target"),
        ({"markov_head_type": "rnn"}, "markov_head_type: 'rnn' is not allowed; expected vanilla or gated"),
        ({"enable_confidence_head": False}, "has a tensor of a confidence head, and says otherwise"),
        ({"confidence_head_with_markov": False}, "confidence_head.proj.weight of shape [1, 80]; [1, 64]"),
    ],
    ("dspark", "deepspec"): [({"num_target_layers": 9}, "num_target_layers: 9 is not allowed; expected 8")],
    ("dspark", "z-lab"): [
        ({"markov_rank": 8}, "dflash_config.markov_rank: 16 is not allowed; expected 8, as outside"),
        ({"input_embedding_scale": 2.0}, "input_embedding_scale: 2.0 is not allowed"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "dialect", "fields", "told"), [(*of, *case) for of, cases in FIELDS.items() for case in cases]
)
def test_fields(kind: str, dialect: str, fields: Fields, told: str, target: TargetFacts, tmp_path: Path) -> None:
    head = WRITERS[kind](tmp_path, dialect=dialect, target=target)
    change_config(head, **fields)
    assert told in refusal(head, target)


MASKS: list[tuple[dict[str, Any], str]] = [
    ({"mask_hidden": None}, "lacks tensor mask_hidden"),
    ({"mask_hidden": torch.ones(1, 1, 64)}, "has tensor mask_hidden of shape [1, 1, 64]; [1, 1, 192] is needed"),
    ({"mask_hidden": torch.full((1, 1, 192), torch.nan)}, "tensor mask_hidden in"),
    ({"mask_states": torch.ones(3)}, "has tensor mask_states, which has no place in a head of peagle"),
]
SELECTOR = "candidate_selector.hidden_projection.weight"
TENSORS: dict[tuple[str, str], list[tuple[dict[str, Any], str]]] = {
    ("eagle3", "safeailab"): [
        ({"norm.weight": None}, "lacks tensor norm.weight"),
        ({"d2t": None}, "lacks tensor d2t: its vocabulary is 100 of the target's 512 tokens"),
        ({"d2t": torch.zeros(99, dtype=torch.int64)}, "has tensor d2t of int64 of shape [99]"),
        ({"d2t": torch.arange(100).neg()}, "has a vocabulary (d2t) that is not 100 different tokens"),
        ({"d2t": torch.zeros(100, dtype=torch.int64)}, "d2t and t2d that contradict each other"),
        ({"midlayer.extra.weight": torch.ones(3)}, "has tensor midlayer.extra.weight, which has no place"),
        ({"mask_hidden": torch.ones(1, 1, 192)}, "names no token of its mask: mask_token_id or pard_token"),
        ({"fc.weight": torch.ones(64, 190)}, "has tensor fc.weight of shape [64, 190]; [64, 192] is needed"),
        ({"norm.weight": torch.full((64,), torch.nan)}, "tensor norm.weight in"),
        ({"norm.weight": torch.ones(64, dtype=torch.float64)}, "has tensor norm.weight of F64"),
        ({"layers.0.mlp.up_proj.weight": torch.ones(96, 64)}, "has two tensors for one"),
    ],
    ("eagle3", "speculators"): [({"mask_hidden": torch.ones(1, 1, 192)}, "'eagle3' is not allowed; expected one of p")],
    **{("peagle", dialect): MASKS for dialect in PEAGLE_DIALECTS},
    ("dspark", "z-lab"): [({SELECTOR: torch.ones(4, 64)}, f"{SELECTOR}, which has no place")],
}


@pytest.mark.parametrize(
    ("kind", "dialect", "changes", "told"), [(*of, *case) for of, cases in TENSORS.items() for case in cases]
)
def test_tensors(kind: str, dialect: str, changes: Fields, told: str, target: TargetFacts, tmp_path: Path) -> None:
    head = WRITERS[kind](tmp_path, dialect=dialect, target=target, draft_vocab=100)
    change_tensors(head, changes)
    assert told in refusal(head, target)


def test_mtp(target: TargetFacts, tmp_path: Path) -> None:
    head = write_mtp(tmp_path, "qwen", target=target)
    change_tensors(head, {"mtp.layers.0.mlp.experts.0.up_proj.weight": torch.ones(4, 64)})
    assert "experts and latent attention are not supported" in refusal(head, target)
    change_tensors(head, {"mtp.layers.0.mlp.experts.0.up_proj.weight": None, "mtp.layers.1.x.weight": torch.ones(4)})
    assert "mtp.layers.1.x.weight, which has no place" in refusal(head, target)
    other = write_mtp(tmp_path / "two", "deepseek", target=target)
    change_config(other, num_nextn_predict_layers=2)
    assert "num_nextn_predict_layers: 2 is not allowed" in refusal(other, target)
    change_config(other, num_nextn_predict_layers=1)
    change_tensors(other, {"model.layers.9.eh_proj.weight": torch.ones(64, 128)})
    assert "has 2 MTP modules" in refusal(other, target)


def test_eagle1(target: TargetFacts, tmp_path: Path) -> None:
    head = write_eagle1(tmp_path, target=target, normed=True)
    change_config(head, bias=False)
    assert "bias: False is not allowed; expected True" in refusal(head, target)
    change_config(head, bias=True)
    change_tensors(head, {"embedding_layernorm.weight": None})
    assert "both are needed" in refusal(head, target)


def test_medusa(target: TargetFacts, tmp_path: Path) -> None:
    head = write_medusa(tmp_path / "a", "vllm", target=target, draft_vocab=100)
    change_tensors(head, {"token_map": None})
    assert "lacks tensor d2t: its vocabulary is 100" in refusal(head, target)
    change_config(head, truncated_vocab_size=101)
    assert "truncated_vocab_size: 101 is not allowed; expected 100" in refusal(head, target)
    pickled = write_medusa(tmp_path / "b", target=target)
    tensors = torch.load(pickled / "medusa_lm_head.pt")
    del tensors["1.0.linear.weight"]
    torch.save(tensors, pickled / "medusa_lm_head.pt")
    assert "lacks tensor heads.1.blocks.0.weight" in refusal(pickled, target)


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        ((1, 2, 9), "9 is not allowed; expected 0 to 8"),
        ((1, 2, 2), "'1,2,2' is not allowed; expected each hidden state once"),
        ((1, 2), "'1,2' is not allowed; expected 3 of them"),
    ],
)
def test_layers_that_do_not_fit(layers: tuple[int, ...], told: str, target: TargetFacts, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=f"^draft_layers: {told}"):
        read_head(write_eagle3(tmp_path, target=target), target, layers)


def test_a_default_needs_layers(tmp_path: Path) -> None:
    small = write_target(tmp_path / "target", layers=4)
    head = write_eagle3(tmp_path / "head", "safeailab", target=small, layers=(1, 2, 3))
    assert "names no layers, and its target has 4" in refusal(head, small)
    assert read_head(head, small, layers=(1, 2, 3)).spec.projection.layers == (1, 2, 3)


def test_what_is_no_head(target: TargetFacts, tmp_path: Path) -> None:
    assert not any(is_head(directory) for directory in (target.directory, tmp_path, tmp_path / "nothing"))
    assert "has tensors of no head that is known" in refusal(target.directory, target)
    assert "is not a directory" in refusal(tmp_path / "nothing", target)
    assert "has no tensors" in refusal(tmp_path, target)
    head = write_eagle3(tmp_path / "cut", target=target)
    (head / "model.safetensors").write_bytes((head / "model.safetensors").read_bytes()[:1000])
    assert "cannot be read" in refusal(head, target)


@pytest.mark.parametrize("dialect", EAGLE3_DIALECTS)
def test_nonsense_in_any_field_is_one_line(dialect: str, target: TargetFacts, tmp_path: Path) -> None:
    head = write_eagle3(tmp_path, dialect, target=target)
    fields = json.loads((head / "config.json").read_text())
    refused = 0
    for name in fields:
        for nonsense in (-1, [None], {"a": [1]}):
            (head / "config.json").write_text(json.dumps({**fields, name: nonsense}))
            try:
                read_spec(head, target)
            except ModelError as error:
                refused += "\n" not in str(error)
    assert refused >= len(fields)
