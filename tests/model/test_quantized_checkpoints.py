"""Quantized safetensors checkpoints: their weights stay in codes, and are those of the publishers' libraries."""

import functools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import FORMS, Writer, compressed, mxfp4
from refusals import refused
from sizes import sized
from support import SNIPPETS, drain, edit_config, edit_tensors, kept_bytes, make_engine, params, run, write_model
from test_gguf_models import likeliest
from torch import Tensor
from transformers import AutoModelForCausalLM

from pilotfish.config.engine import EngineConfig
from pilotfish.engine.checks import check_models
from pilotfish.errors import ModelError, ParameterError
from pilotfish.model.grouped import GroupedLinear
from pilotfish.model.heads.target import TargetFacts
from pilotfish.model.loading.configuration import load_config
from pilotfish.model.loading.footprint import footprint
from pilotfish.model.loading.loader import load_model
from pilotfish.model.loading.packed_weights import dequantize, load_packed
from pilotfish.train.taught_target import TaughtTarget

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of rows that are whole groups, and blocks that are not whole; in bfloat16."""
    shape = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 2}
    directory = write_model(tmp_path_factory.mktemp("plain") / "model", "llama", **shape)
    return edit_tensors(directory, lambda tensors: tensors.update({name: x.bfloat16() for name, x in tensors.items()}))


def linears(module: Any) -> dict[str, GroupedLinear]:
    return {f"{name}.weight": part for name, part in module.named_modules() if isinstance(part, GroupedLinear)}


@pytest.mark.parametrize("form", FORMS)
def test_values_are_the_librarys_to_the_last_bit(form: str, plain: Path, tmp_path: Path) -> None:
    """On other devices they are loaded dense."""
    directory = tmp_path / "model"
    values = FORMS[form](plain, directory)
    module = load_packed(directory, load_config(directory), torch.float32)
    found = linears(module)
    assert found.keys() == values.keys() and len(values) == 14
    for name, linear in found.items():
        assert torch.equal(replace(linear.weight, dtype=values[name].dtype).dequantized(), values[name]), name
    dequantize(module)
    assert torch.equal(module.get_parameter(name), linear.weight.dequantized())


@torch.inference_mode()
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("form", sized(["fp8 blocks", "packed with zeros", "gptq"], list(FORMS)))
def test_logits_are_those_of_the_dequantized_model(form: str, plain: Path, tmp_path: Path) -> None:
    """As transformers computes them, in float32; in bfloat16 as near as the reference, which rounds its weights too."""
    FORMS[form](plain, directory := tmp_path / "model")
    found = linears(load_packed(directory, load_config(directory), torch.float32))
    module = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    module.load_state_dict({name: linear.weight.dequantized() for name, linear in found.items()}, strict=False)
    ids = make_engine(directory, dtype="float32").tokenizer.encode(SNIPPETS[0])
    exact, errors = module(torch.tensor([ids])).logits[0, -1].log_softmax(-1), {}
    for dtype, eager in product(("float32", "bfloat16"), (False, True)):
        served = likeliest(make_engine(directory, dtype=dtype, eager=eager))
        errors[dtype, eager] = torch.tensor([value - exact[token] for token, value in served.items()]).norm()
    assert max(errors["float32", False], errors["float32", True]) < 1e-4
    assert 1e-3 < errors["bfloat16", False] < 1.25 * errors["bfloat16", True]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("form", ["fp8 blocks", "int8", "packed with zeros", "awq"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_speculation_changes_no_token(form: str, dtype: str, plain: Path, tmp_path: Path) -> None:
    FORMS[form](plain, directory := tmp_path / "model")
    asked = [params(max_tokens=24, seed=i, temperature=0.8 * (i % 2)) for i in range(len(SNIPPETS))]
    off = run(make_engine(directory, dtype=dtype), SNIPPETS, asked)
    for drafts in ({"draft": directory, "drafter": "lm"}, {"drafter": "ngram"}):
        engine = make_engine(directory, dtype=dtype, mode="sync", nodes=8, **drafts)
        samples = [engine.submit(*one)[0] for one in zip(SNIPPETS, asked, strict=True)]
        drain(engine)
        assert [sample.token_ids for sample in samples] == off
        assert sum(sample.request.stats.accepted_tokens for sample in samples) > 0 or drafts["drafter"] == "ngram"


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("form", FORMS)
def test_the_plan_counts_codes(form: str, plain: Path, tmp_path: Path) -> None:
    FORMS[form](plain, directory := tmp_path / "model")
    for eager in (False, True):
        planned = footprint(directory, torch.bfloat16, CPU, eager=eager).weights
        kept = kept_bytes(load_model(directory, torch.bfloat16, CPU, eager=eager).module)
        assert planned == pytest.approx(kept, rel=0.02)
        assert planned < 0.9 * footprint(plain, torch.bfloat16, CPU, eager=eager).weights
    report = check_models(EngineConfig(target=directory, mode="off", kv_slots=256))
    assert report.problems == [] and report.target is not None


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("kind", "write", "in_codes"),
    [("qwen3_moe", FORMS["fp8 blocks"], 8), ("gpt_oss", mxfp4, 0), ("deepseek_v3", FORMS["fp8 blocks"], 6)],
)
def test_experts_are_loaded_dense(kind: str, write: Writer, in_codes: int, tmp_path: Path) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
    model, directory = write_model(tmp_path / "plain", kind, **shape), tmp_path / "model"
    values = write(model, directory)
    assert any("experts" in name for name in values)
    edit_tensors(model, lambda tensors: tensors.update({name: x.float().contiguous() for name, x in values.items()}))
    ours, theirs = (load_model(path, torch.float32, CPU, eager=True).module for path in (directory, model))
    assert torch.equal(*(module.model.layers[1].mlp.experts.gate_up_proj for module in (ours, theirs)))
    assert len(linears(ours)) == in_codes
    asked = [params(max_tokens=8, temperature=0.0)]
    assert run(make_engine(directory), SNIPPETS[:1], asked) == run(make_engine(model), SNIPPETS[:1], asked)
    for eager in (False, True):
        kept = kept_bytes(load_model(directory, torch.bfloat16, CPU, eager=eager).module)
        assert footprint(directory, torch.bfloat16, CPU, eager=eager).weights == pytest.approx(kept, rel=0.02)


def test_inputs_that_may_be_in_another_order_need_their_groups(plain: Path, tmp_path: Path) -> None:
    FORMS["gptq"](plain, directory := tmp_path / "model")
    edit_tensors(directory, lambda tensors: [tensors.pop(name) for name in [*tensors] if name.endswith("g_idx")])
    assert load_model(directory, torch.float32, CPU, eager=True)
    about = json.loads((directory / "config.json").read_text())["quantization_config"]
    edit_config(directory, quantization_config={**about, "desc_act": True})
    assert "lacks tensor" in refused(ModelError, load_model, directory, torch.float32, CPU, eager=True)


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    plain, directory = write_model(tmp_path / "plain", "deepseek_v3", hidden_size=256), tmp_path / "model"
    FORMS["fp8 blocks"](plain, directory)
    more = "model.layers.2."
    edit_tensors(
        directory,
        lambda all_: all_.update(
            {n.replace("model.layers.1.", more): x.clone() for n, x in all_.items() if ".1." in n}
        ),
    )
    asked = [params(max_tokens=4, temperature=0.0)]
    assert f"tensor {more}" in refused(ModelError, load_model, directory, torch.float32, CPU, eager=True)
    edit_config(directory, num_nextn_predict_layers=1)
    assert run(make_engine(directory), SNIPPETS[:1], asked)[0]


def test_a_quantized_head(plain: Path, tmp_path: Path) -> None:
    values = compressed(plain, tmp_path / "model", ignore=(), type="float", strategy="channel")
    assert torch.equal(TargetFacts.read(tmp_path / "model").lm_head().bfloat16(), values["lm_head.weight"])
    taught = TaughtTarget(tmp_path / "model", CPU).module
    assert not linears(taught) and torch.equal(taught.lm_head.weight.bfloat16(), values["lm_head.weight"])
    edit_config(tmp_path / "model", tie_word_embeddings=True)
    assert "is not the embedding" in refused(ModelError, load_model, tmp_path / "model", torch.float32, CPU, eager=True)


def test_options_that_do_not_fit(plain: Path, tmp_path: Path) -> None:
    FORMS["awq"](plain, tmp_path / "model")
    with pytest.raises(ParameterError, match=r"quantization: 'int8' is not allowed; expected none: .* in awq"):
        load_model(tmp_path / "model", torch.float32, CPU, eager=True, quantization="int8")
    with pytest.raises(ParameterError, match="tensor_parallel: 2 is not allowed; expected 1"):
        footprint(tmp_path / "model", torch.float32, CPU, eager=True, ranks=2)


_GROUP = "config_groups", "group_0"
_WEIGHTS = *_GROUP, "weights"


@pytest.mark.parametrize(
    ("form", "path", "value", "named"),
    [
        ("fp8 blocks", ["fmt"], "e5m2", "fmt: 'e5m2' is not supported; allowed: 'e4m3'"),
        ("fp8 blocks", ["weight_block_size"], [128], r"weight_block_size: \[128\] .* two positive integers"),
        ("fp8 blocks", ["modules_to_convert"], ["embed"], r"modules_to_convert: \['embed'\] .* allowed: null"),
        ("fp8 blocks", ["quant_method"], "bitsandbytes", "quantized by bitsandbytes; fp8, compressed-tensors"),
        ("packed", ["kv_cache_scheme"], {"num_bits": 8}, "kv_cache_scheme.num_bits: 8"),
        ("packed", ["sparsity_config"], {"format": "sparse-24-bitmask"}, "sparsity_config.format: 'sparse-24"),
        ("packed", ["transform_config"], {"config_groups": {"u": {}}}, "transform_config.config_groups"),
        ("packed", ["config_groups"], {}, "config_groups: {} is not supported; allowed: one group"),
        ("packed", ["format"], "marlin-24", "format: 'marlin-24'"),
        ("packed", [*_WEIGHTS, "num_bits"], 3, "weights.num_bits: 3 is not supported; allowed: 4, 8"),
        ("packed", [*_WEIGHTS, "type"], "float", "format: 'pack-quantized of 4 bits .float.'"),
        ("float channel", [*_WEIGHTS, "symmetric"], False, "symmetric: False is not supported; allowed: True"),
        ("packed", [*_WEIGHTS, "actorder"], "group", "weights.actorder: 'group'"),
        ("packed", [*_WEIGHTS, "group_size"], 0, "group_size: 0 .* -1 or a positive integer"),
        ("packed", [*_GROUP, "output_activations"], {"num_bits": 8}, "output_activations.num_bits: 8"),
        ("awq", ["version"], "gemv", "version: 'gemv' is not supported; allowed: 'gemm'"),
        ("awq", ["bits"], 3, "bits: 3"),
        ("awq", ["zero_point"], False, "zero_point: False"),
        ("gptq", ["checkpoint_format"], "gptq_v2", "checkpoint_format: 'gptq_v2'"),
        ("gptq", ["dynamic"], {"-:lm_head": {}, "+:x": {"bits": 8}}, r"dynamic.\+:x"),
        ("gptq", ["bits"], 2, "bits: 2 is not supported; allowed: 4, 8"),
        ("gptq", ["rotation"], "hadamard", "rotation: 'hadamard'"),
    ],
)
def test_fields_that_are_not_honoured_are_refused(
    form: str, path: list[str], value: Any, named: str, plain: Path, tmp_path: Path
) -> None:
    FORMS[form](plain, directory := tmp_path / "model")
    about = json.loads((directory / "config.json").read_text())["quantization_config"]
    functools.reduce(dict.__getitem__, path[:-1], about)[path[-1]] = value
    edit_config(directory, quantization_config=about)
    line = refused(ModelError, load_config, directory)
    assert re.search(named, line) and str(directory) in line


SCALES = "weight_scale_inv"


@pytest.mark.parametrize(
    ("form", "tensor", "change", "named"),
    [
        ("fp8 blocks", SCALES, None, "lacks tensor .*down_proj.weight_scale_inv"),
        ("fp8 blocks", SCALES, lambda x: x[:1], r"shape \[1, 3\]; \[2, 3\] is needed"),
        ("fp8 blocks", SCALES, lambda x: x.to(torch.int32), "is int32; needed is one of float32"),
        ("fp8 blocks", SCALES, lambda x: x * torch.nan, "weight_scale_inv holds NaN or infinity"),
        ("fp8 blocks", "weight", lambda x: (x.float() * torch.nan).to(x.dtype), "weight holds NaN"),
        ("fp8 blocks", "weight", lambda x: x.float().to(torch.float8_e5m2), "is float8_e5m2"),
        ("fp8 blocks", "weight", lambda x: x[:, :128], r"weight_scale_inv has shape \[2, 3\]; \[2, 1\]"),
        ("packed", "weight_packed", lambda x: x[:, :-1], r"down_proj.weight has shape \[256, 376\]; \[256, 384\]"),
        ("packed", "weight_packed", None, "weight_s.* has no place in the model"),
        ("packed", "weight_shape", lambda x: x.flip(0), r"weight_shape is \[384, 256\]; \[256, 384\] is needed"),
        ("gptq", "g_idx", lambda x: x.flip(0), r"g_idx orders inputs \(desc_act\)"),
        ("gptq", "bias", lambda x: x + 1, "down_proj.bias is not zero, and the model has no such bias"),
        ("gptq", "qzeros", lambda x: x + 1, "qzeros holds zero points, and config.json says"),
        ("awq", "qzeros", lambda x: x[:, 1:], r"qzeros has shape \[6, 31\]; \[6, 32\] is needed"),
        ("awq", "scales", None, "lacks tensor .*down_proj.scales, which .*qweight needs"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    form: str, tensor: str, change: Callable[[Tensor], Tensor] | None, named: str, plain: Path, tmp_path: Path
) -> None:
    """By the check of headers too, where it is not for the values."""
    FORMS[form](plain, directory := tmp_path / "model")
    name = f"model.layers.1.mlp.down_proj.{tensor}"
    changed = lambda x: {} if change is None else {name: change(x).contiguous()}  # noqa: E731
    edit_tensors(directory, lambda tensors: tensors.update(changed(tensors.pop(name))))
    line = refused(ModelError, load_model, directory, torch.float32, CPU, eager=True)
    assert re.search(named, line) and str(directory) in line
    problems = check_models(EngineConfig(target=directory, mode="off", kv_slots=256)).problems
    assert problems == ([] if re.search("holds|weight_shape is|orders|is not zero", line) else [line])
