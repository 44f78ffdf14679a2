"""MTP modules, EAGLE-1 and Medusa heads are read as what they are."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from head_files import (
    FFN,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    MTP_DIALECTS,
    change_tensors,
    refusal,
    write_eagle1,
    write_medusa,
    write_mtp,
)
from safetensors.torch import load_file

from pilotfish.model.heads.families.medusa import MedusaHead
from pilotfish.model.heads.families.recurrent import RecurrentHead
from pilotfish.model.heads.files import read_head, read_spec
from pilotfish.model.heads.spec import FINAL, Decoder, HeadSpec, Projection
from pilotfish.model.heads.target import TargetFacts
from pilotfish.model.heads.weights import is_head

FINAL_STATE = Projection((FINAL,), 64, fc=False, eps=1e-5)


def decoder(**facts: Any) -> Decoder:
    return Decoder(1, 64, HEADS, KV_HEADS, HEAD_DIM, FFN, eps=1e-5, context=2048, **facts)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dialect", MTP_DIALECTS)
def test_mtp_modules_alone_and_in_a_models_checkpoint(
    dialect: str, whole: bool, target: TargetFacts, tmp_path: Path
) -> None:
    if whole and dialect == "speculators":
        return  # its files hold nothing else
    head = write_mtp(tmp_path, dialect, target=target, whole=whole)
    files, published = read_head(head, target), load_file(tmp_path / "model.safetensors")
    expected = RecurrentHead(
        FINAL_STATE,
        decoder(qk_norm=True),
        "joined",
        hidden_first=dialect == "mimo",
        recycles_normed=True,
        zero_first_embedding=dialect in ("mimo", "deepseek"),
    )
    assert is_head(head)
    assert files.spec == HeadSpec(expected, "mtp", dialect, 64, 8, 512)
    hidden_norm = next(
        x
        for name, x in published.items()
        if name.endswith(("hnorm.weight", "hidden_layernorm.weight", "norm_hidden.weight"))
    )
    assert torch.equal(files.tensors["hidden_norm.weight"], hidden_norm)
    own = published.get("model.layers.8.embed_tokens.weight")
    assert torch.equal(files.tensors["embed_tokens.weight"], target.embedding() if own is None else own)
    assert {"input_proj.weight", "embed_norm.weight", "norm.weight", "lm_head.weight"} <= set(files.tensors)
    assert len(files.tensors) == 17


@pytest.mark.parametrize(("model_type", "offset"), [("qwen3", 0.0), ("qwen3_next", 1.0), ("qwen3_5_text", 1.0)])
@pytest.mark.parametrize("dialect", ["qwen", "speculators"])
def test_qwens_gates_and_norms(
    dialect: str, model_type: str, offset: float, target: TargetFacts, tmp_path: Path
) -> None:
    head = write_mtp(tmp_path, dialect, target=target, gated=True, model_type=model_type)
    found = read_spec(head, target).head
    assert isinstance(found, RecurrentHead)
    assert found.decoder == decoder(qk_norm=True, gated_attention=True, norm_offset=offset)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_eagle1(bias: bool, normed: bool, target: TargetFacts, tmp_path: Path) -> None:
    head = write_eagle1(tmp_path, target=target, bias=bias, normed=normed)
    files = read_head(head, target)
    assert is_head(head)
    assert files.spec == HeadSpec(RecurrentHead(FINAL_STATE, decoder(), "joined"), "eagle1", "safeailab", 64, 8, 512)
    assert ("input_proj.bias" in files.tensors) == bias
    assert ("embed_norm.weight" in files.tensors) == ("hidden_norm.weight" in files.tensors) == normed
    assert "layers.0.input_layernorm.weight" not in files.tensors
    assert torch.equal(files.tensors["lm_head.weight"], target.lm_head())


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("dialect", ["medusa", "vllm"])
def test_medusas_weights_say_how_many_heads_there_are(
    dialect: str, blocks: int, target: TargetFacts, tmp_path: Path
) -> None:
    head = write_medusa(tmp_path, dialect, target=target, blocks=blocks)
    files = read_head(head, target)
    expected = MedusaHead(Projection((FINAL,), 64, fc=False), 64, 3, blocks, bias=dialect == "medusa")
    assert is_head(head)
    assert files.spec == HeadSpec(expected, "medusa", dialect, 64, 8, 512)
    read = torch.load if dialect == "medusa" else load_file
    published = read(next(path for path in tmp_path.iterdir() if path.name != "config.json"))
    last = blocks - 1
    names = (f"2.{last}.linear", f"2.{blocks}") if dialect == "medusa" else (f"blocks.2.layers.{last}", "lm_heads.2")
    for ours, theirs in zip((f"heads.2.blocks.{last}", "heads.2.lm_head"), names, strict=True):
        assert torch.equal(files.tensors[f"{ours}.weight"], published[f"{theirs}.weight"])


def test_medusas_vocabulary_is_a_list_of_ids(target: TargetFacts, tmp_path: Path) -> None:
    head = write_medusa(tmp_path, "vllm", target=target, draft_vocab=100)
    files = read_head(head, target)
    assert files.d2t is not None
    assert torch.equal(files.d2t, load_file(tmp_path / "model.safetensors")["token_map"])


def test_one_lm_head_for_all_of_medusas(target: TargetFacts, tmp_path: Path) -> None:
    head = write_medusa(tmp_path, "vllm", target=target, original_lm_head=True)
    one = torch.ones(512, 64)
    change_tensors(head, {**{f"lm_heads.{i}.weight": None for i in range(3)}, "lm_head.weight": one})
    tensors = read_head(head, target).tensors
    assert all(torch.equal(tensors[f"heads.{i}.lm_head.weight"], one) for i in range(3))


class Spy:
    """Would write a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_a_pickle_runs_no_code(target: TargetFacts, tmp_path: Path) -> None:
    head = write_medusa(tmp_path / "head", target=target)
    spied = tmp_path / "spied"
    torch.save({"0.0.linear.weight": Spy(spied)}, head / "medusa_lm_head.pt")
    assert "cannot be read" in refusal(head, target)
    (head / "medusa_lm_head.pt").write_bytes(pickle.dumps(Spy(spied)))
    assert "cannot be read" in refusal(head, target)
    assert not spied.exists()


@pytest.mark.parametrize(
    ("name", "tensor", "told"),
    [
        (7, torch.zeros(2), "holds something else than tensors by name"),
        (b"7", torch.zeros(2), "holds something else than tensors by name"),
        ("x", 7, "holds x, which is no dense tensor with values"),
        ("x", torch.zeros(2, 2).to_sparse(), "holds x, which is no dense tensor with values"),
        ("x", torch.zeros(2, device="meta"), "holds x, which is no dense tensor with values"),
    ],
)
def test_a_pickle_of_something_else(
    name: object, tensor: object, told: str, target: TargetFacts, tmp_path: Path
) -> None:
    head = write_medusa(tmp_path, target=target)
    torch.save({name: tensor}, head / "medusa_lm_head.pt")
    assert told in refusal(head, target)
