"""Models of GGUF files: what the files hold, in the codes that they have, as transformers computes it."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from sizes import sized
from support import SNIPPETS, drain, edit_tensors, kept_bytes, make_engine, params, run, write_model
from test_gguf_blocks import random_rows
from torch import Tensor

from pilotfish.engine.engine import Engine
from pilotfish.engine.pairs.directories import gguf_directory
from pilotfish.errors import ModelError, ParameterError
from pilotfish.model.backends import gguf_file
from pilotfish.model.grouped import GroupedLinear
from pilotfish.model.heads.target import TargetFacts
from pilotfish.model.loading.footprint import footprint
from pilotfish.model.loading.gguf_blocks import BLOCKS
from pilotfish.model.loading.loader import load_model
from pilotfish.model.loading.metadata import load_tokenizer
from pilotfish.model.loading.packed_weights import dequantize
from pilotfish.model.loading.tensors import GGUF_INDEX

CPU = torch.device("cpu")
#: Types that gguf's package can write; of the others any codes, with small factors.
WRITTEN = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
#: As llama.cpp mixes types: values in more bits than queries and keys.
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "token_embd": "Q8_0"}


def encoded(tensor: Tensor, kind: str) -> np.ndarray[Any, Any]:
    if kind in WRITTEN:
        return gguf.quantize(tensor.float().numpy(), gguf.GGMLQuantizationType[kind])
    outputs, inputs = tensor.shape
    return random_rows(kind, outputs, inputs // BLOCKS[kind].inputs, scale=2e-3)


def write(model: Path, path: Path, kind_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GGUF file of a model's directory; `kind_of` names the types of matrices."""

    def add(writer: Any, name: str, tensor: Tensor, _: str) -> None:
        kind = kind_of(name)
        if tensor.ndim == 1 or kind in ("F32", "F16", "BF16"):
            return plain(writer, name, tensor, kind.lower())
        return writer.add_tensor(name, encoded(tensor, kind), raw_dtype=gguf.GGMLQuantizationType[kind])

    plain = gguf_file._add_tensor
    monkeypatch.setattr(gguf_file, "_add_tensor", add)
    gguf_file.write_gguf(model, path, "f32")
    monkeypatch.setattr(gguf_file, "_add_tensor", plain)
    return path


@pytest.fixture
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of rows that are whole blocks of 256."""
    shape = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "tie_word_embeddings": True}
    return write_model(tmp_path_factory.mktemp("wide"), "llama", **shape)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pilotfish.engine.pairs.directories.cache_folder", partial(Path, tmp_path))


def likeliest(engine: Engine) -> dict[int, float]:
    """Tokens after a prompt, and their log-probabilities."""
    (sample,) = engine.submit(SNIPPETS[0], params(max_tokens=1, temperature=0.0, logprobs=20))
    drain(engine)
    return dict(sample.logprobs[0].top)


def mixed(name: str) -> str:
    return next((kind for part, kind in MIXED.items() if part in name), "Q4_K")


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_file_gives_the_tokens_of_the_directory_that_it_was_made_of(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, order of rows, config and tokenizer; in float32."""
    full: dict[str, Any] = {"sliding_window": None}
    if kind == "qwen3":
        full |= {"use_sliding_window": False, "layer_types": ["full_attention"] * 2}
    model = write_model(tmp_path / "model", kind, **full)
    file = write(model, tmp_path / "model.gguf", lambda _: "F32", monkeypatch)
    made = gguf_directory(file)
    asked = [params(max_tokens=12, seed=i) for i in range(len(SNIPPETS))]
    own = load_tokenizer(model)
    prompts = [own.encode(text) for text in SNIPPETS]  # the file names another way to split texts
    ours, theirs = (run(make_engine(directory), prompts, asked) for directory in (made, model))
    assert ours == theirs
    made_of = load_tokenizer(made)
    assert made_of.decode(prompts[0]) == SNIPPETS[0]
    assert made_of.encode("x")[0] == made_of.bos_token_id  # it names Llama 3's split: llama.cpp begins with bos
    assert '"eos_token_id": [0]' in (made / "generation_config.json").read_text()
    assert gguf_directory(file) == made
    os.utime(file, ns=(1, 1))
    assert gguf_directory(file) != made


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", [*sized(["Q4_0", "Q8_0"], WRITTEN), "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_the_dequantized_model(
    kind: str, dtype: torch.dtype, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the reference and by the kernels, whose weights stay in codes."""
    file = write(wide, tmp_path / "model.gguf", mixed if kind == "mixed" else lambda _: kind, monkeypatch)
    directory = gguf_directory(file)
    reference = load_model(directory, dtype, CPU, eager=True)
    linears = [part for part in reference.module.modules() if isinstance(part, GroupedLinear)]
    assert len(linears) == 2 * 7 + 1
    exact = likeliest(make_engine(directory, dtype="float32", eager=True))
    errors = []
    for eager in (False, True):
        logprobs = likeliest(make_engine(directory, dtype=str(dtype)[6:], eager=eager))
        common = [*logprobs.keys() & exact.keys()]
        assert len(common) > 10
        errors.append(float(np.linalg.norm([logprobs[token] - exact[token] for token in common])) / len(common) ** 0.5)
    if dtype == torch.float32:
        assert max(errors) < 1e-5
    else:  # as near as the reference, which rounds its weights to bfloat16 too
        assert errors[0] < 1.25 * errors[1]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_speculation_changes_no_token(dtype: str, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = gguf_directory(write(wide, tmp_path / "model.gguf", mixed, monkeypatch))
    asked = [params(max_tokens=24, seed=i) for i in range(len(SNIPPETS))]
    plain = run(make_engine(directory, dtype=dtype), SNIPPETS, asked)
    for drafts in ({"draft": directory, "drafter": "lm"}, {"drafter": "ngram"}):
        engine = make_engine(directory, dtype=dtype, mode="sync", nodes=8, **drafts)
        samples = [engine.submit(*one)[0] for one in zip(SNIPPETS, asked, strict=True)]
        drain(engine)
        assert [sample.token_ids for sample in samples] == plain
        assert sum(sample.request.stats.accepted_tokens for sample in samples) > 0


@pytest.mark.usefixtures("kernels")
def test_the_plan_counts_codes(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = {}
    for kind in ("F32", "Q8_0", "Q4_0", "mixed"):
        file = write(wide, tmp_path / f"{kind}.gguf", mixed if kind == "mixed" else lambda _, k=kind: k, monkeypatch)
        directory = gguf_directory(file)
        for eager in (False, True) if kind != "mixed" else (False,):  # the reference joins no products
            plans[kind] = footprint(directory, torch.bfloat16, CPU, eager=eager).weights
            kept = kept_bytes(load_model(directory, torch.bfloat16, CPU, eager=eager).module)
            assert plans[kind] == pytest.approx(kept, rel=0.02)
    assert plans["Q4_0"] < plans["Q8_0"] < plans["F32"]


def test_a_file_in_parts(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gguf_directory(write(wide, tmp_path / "model.gguf", lambda _: "Q8_0", monkeypatch))
    writer = gguf.GGUFWriter
    monkeypatch.setattr(gguf, "GGUFWriter", partial(writer, split_max_tensors=8))
    write(wide, tmp_path / "parts.gguf", lambda _: "Q8_0", monkeypatch)
    first, *others = sorted(tmp_path.glob("parts-*.gguf"))
    assert others
    asked = [params(max_tokens=8, seed=1)]
    ours, theirs = (run(make_engine(one), SNIPPETS[:1], asked) for one in (gguf_directory(first), whole))
    assert ours == theirs
    others[0].unlink()
    with pytest.raises(ModelError, match=rf"{others[0].name} is not there; {first.name} is one of"):
        gguf_directory(first)


def rotated(file: bytes, count: int) -> bytes:
    """With so many dimensions of a head rotated."""
    at = file.index(b"llama.rope.dimension_count") + len(b"llama.rope.dimension_count") + 4
    return file[:at] + count.to_bytes(4, "little") + file[at + 4 :]


def test_what_cannot_be_served_is_one_line(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(wide, tmp_path / "model.gguf", lambda _: "Q8_0", monkeypatch)
    whole = file.read_bytes()

    def refused(match: str, data: bytes) -> None:
        file.write_bytes(data)
        with pytest.raises(ModelError, match=match) as raised:
            gguf_directory(file)
        assert "\n" not in str(raised.value) and str(file) in str(raised.value)
        assert not [*tmp_path.glob("gguf-models/*/gguf/*")]  # nothing half made

    refused("cannot be read as GGUF", whole[: len(whole) // 2])
    refused("cannot be read as GGUF", b"GGUX" + whole[4:])
    refused("cannot be read as GGUF", whole[:100])
    refused("general.architecture: 'lmama'; supported are llama", whole.replace(b"llama", b"lmama", 1))
    refused("no tokenizer", whole.replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.takens"))
    refused("llama.rope.dimension_count: 64 is not supported, only 32", rotated(whole, 64))
    refused("tokenizer.ggml.pre: 'llama-xyz' is not known", whole.replace(b"llama-bpe", b"llama-xyz"))
    refused("lacks tensor blk.1.ffn_up.weight", whole.replace(b"blk.1.ffn_up.weight", b"blk.9.ffn_up.weight"))


def test_a_file_that_was_replaced_is_not_read_by_its_old_index(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(wide, tmp_path / "model.gguf", lambda _: "Q8_0", monkeypatch)
    directory = gguf_directory(file)
    write(wide, file, lambda _: "Q4_0", monkeypatch)
    for change in (lambda: None, file.unlink):
        change()
        with pytest.raises(ModelError, match=rf"{file} has changed or gone since .*; give the file again"):
            load_model(directory, torch.float32, CPU, eager=True)


def test_options_that_do_not_fit(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = gguf_directory(write(wide, tmp_path / "model.gguf", lambda _: "Q8_0", monkeypatch))
    with pytest.raises(ParameterError, match=r"quantization: 'int8' is not allowed; expected none: .* in gguf"):
        load_model(directory, torch.float32, CPU, eager=True, quantization="int8")
    with pytest.raises(ParameterError, match="tensor_parallel: 2 is not allowed; expected 1"):
        footprint(directory, torch.float32, CPU, eager=True, ranks=2)
    fields = json.loads((directory / "config.json").read_text())
    assert fields["quantization_config"] == {"quant_method": "gguf"}
    (directory / GGUF_INDEX).unlink()
    with pytest.raises(ModelError, match=r"has no gguf.json; give the GGUF file"):
        load_model(directory, torch.float32, CPU, eager=True)
    with pytest.raises(ModelError, match=r"quantized by bitsandbytes; .* GGUF files are supported"):
        other = {"quantization_config": {"quant_method": "bitsandbytes"}}
        (directory / "config.json").write_text(json.dumps({**fields, **other}))
        load_model(directory, torch.float32, CPU, eager=True)


def test_a_tensor_that_is_not_finite_is_named(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_tensors(wide, lambda tensors: tensors["model.norm.weight"].fill_(torch.nan))
    directory = gguf_directory(write(wide, tmp_path / "model.gguf", lambda _: "Q8_0", monkeypatch))
    with pytest.raises(ModelError, match=r"tensor model.norm.weight in .*/00000-.*.gguf holds NaN or infinity"):
        load_model(directory, torch.float32, CPU, eager=True)


@pytest.mark.usefixtures("kernels")
def test_products_are_joined_of_any_types(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values in bfloat16 beside queries and keys in codes."""
    kinds = {"attn_v": "BF16", "attn_k": "Q4_0"}
    kind_of = lambda name: next((kind for part, kind in kinds.items() if part in name), "Q8_0")  # noqa: E731
    directory = gguf_directory(write(wide, tmp_path / "model.gguf", kind_of, monkeypatch))
    ours, theirs = (likeliest(make_engine(directory, eager=eager)) for eager in (False, True))
    assert all(ours[token] == pytest.approx(theirs[token], abs=1e-3) for token in [*ours][:10])


def test_other_devices_and_heads_read_dequantized_weights(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = gguf_directory(write(wide, tmp_path / "model.gguf", mixed, monkeypatch))
    module: Any = load_model(directory, torch.float32, CPU, eager=True).module
    codes = {name: part.weight for name, part in module.named_modules() if isinstance(part, GroupedLinear)}
    dequantize(module)
    for name, weight in codes.items():
        assert torch.equal(module.get_submodule(name).weight, weight.dequantized())
    facts = TargetFacts.read(directory)
    assert torch.equal(facts.embedding(), module.get_input_embeddings().weight)
    assert torch.equal(facts.lm_head(), module.lm_head.weight) and len(facts.digest()) == 64
