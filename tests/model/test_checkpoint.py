"""Weight files that are not the model of their configuration are refused in one line that names the tensor."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file, save_file
from sizes import sized
from support import KINDS, edit_config, edit_tensors, tiny_model, weights, write_model

from pilotfish.config.engine import EngineConfig
from pilotfish.engine.checks import check_models
from pilotfish.engine.pairs import resolve_pair
from pilotfish.errors import ModelError
from pilotfish.model.loading.checkpoint import check_weights, read_headers
from pilotfish.model.loading.configuration import load_config
from pilotfish.model.loading.footprint import footprint
from pilotfish.model.loading.loader import LoadedModel, load_model
from pilotfish.model.loading.tensors import weight_files

CPU = torch.device("cpu")
#: transformers checks them all in one way; experts it joins.
SOME = sized(("llama", "qwen3_moe"), KINDS)
Tensors = dict[str, torch.Tensor]
Refusal = Callable[[Path], str]


def load(directory: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(directory, dtype, CPU, eager=True)


def problems(directory: Path) -> list[str]:
    return check_models(EngineConfig(target=directory, mode="off", dtype="float32", kv_slots=256)).problems


@pytest.fixture
def refusal(foreign_lines: list[str]) -> Refusal:
    """The line that both the loader and `models check` give; nothing else is logged."""
    return lambda directory: _refusal(directory, foreign_lines)


def _refusal(directory: Path, foreign_lines: list[str]) -> str:
    line = refused(ModelError, load, directory)
    assert problems(directory) == [line] and foreign_lines == []
    return line


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def having(name: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


def a_row_shorter(tensors: Tensors) -> None:
    tensors[OUT] = tensors[OUT][:-1].clone()


BIAS, OUT = "model.layers.1.input_layernorm.bias", "model.layers.1.self_attn.o_proj.weight"


@pytest.mark.parametrize("kind", SOME)
def test_any_tensor_that_is_missing_surplus_or_of_another_shape_is_found(
    kind: str, tiny_models: dict[str, Path], tmp_path: Path, refusal: Refusal
) -> None:
    copy = Path(shutil.copytree(tiny_models[kind], tmp_path / "model"))
    names = sorted(load_file(weights(copy)))
    missing = [(without(name), f"lacks tensor {name}, ") for name in (names[len(names) // 2], names[-1])]
    for change, told in (
        *missing,
        (a_row_shorter, f"tensor {OUT} has shape [63, 128]; [64, 128] is needed"),
        (having(BIAS, torch.ones(64)), f"tensor {BIAS} has no place"),
    ):
        shutil.copy(weights(tiny_models[kind]), weights(copy))
        assert told in refusal(edit_tensors(copy, change))


@pytest.mark.parametrize("kind", SOME)
def test_more_layers_than_the_configuration_says_are_surplus(
    kind: str, tiny_models: dict[str, Path], tmp_path: Path, refusal: Refusal
) -> None:
    copy = Path(shutil.copytree(tiny_models[kind], tmp_path / "model"))
    layer_types = json.loads((copy / "config.json").read_text()).get("layer_types")
    edit_config(copy, num_hidden_layers=1, **({"layer_types": layer_types[:1]} if layer_types else {}))
    line = refusal(copy)
    assert "tensor model.layers.1." in line and "has no place in the model of its config.json (and " in line


def test_layers_that_guess_further_tokens_are_left_out(
    tiny_models: dict[str, Path], tmp_path: Path, refusal: Refusal
) -> None:
    """One of them, with experts, an embedding and a head, as DeepSeek's checkpoints have it."""
    copy = Path(shutil.copytree(tiny_models["deepseek_v3"], tmp_path / "model"))
    last = {name: tensor for name, tensor in load_file(weights(copy)).items() if name.startswith("model.layers.1.")}
    more = {name.replace("layers.1.", "layers.2."): tensor.clone() for name, tensor in last.items()}
    more |= {f"model.layers.2.{name}.weight": torch.ones(4) for name in ("eh_proj", "embed_tokens", "shared_head.head")}
    edit_tensors(copy, lambda tensors: tensors.update(more))
    assert "tensor model.layers.2.eh_proj.weight has no place" in refusal(copy)
    edit_config(copy, num_nextn_predict_layers=1)
    both = [load(directory).module.state_dict() for directory in (copy, tiny_models["deepseek_v3"])]
    assert both[0].keys() == both[1].keys() and all(map(torch.equal, *(each.values() for each in both)))
    assert problems(copy) == []


def test_a_correction_of_a_router_that_is_not_finite_is_named(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """A buffer, by which experts are chosen."""
    copy, name = (
        Path(shutil.copytree(tiny_models["deepseek_v3"], tmp_path / "model")),
        "mlp.gate.e_score_correction_bias",
    )
    edit_tensors(copy, lambda tensors: tensors[f"model.layers.1.{name}"].fill_(float("nan")))
    assert f"model.layers.1.{name}" in refused(ModelError, load, copy)


def test_an_expert_that_lacks_one_projection_is_named(
    tiny_models: dict[str, Path], tmp_path: Path, refusal: Refusal
) -> None:
    copy = Path(shutil.copytree(tiny_models["qwen3_moe"], tmp_path / "model"))
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert f"lacks tensor {name}, " in refusal(edit_tensors(copy, without(name)))


def test_one_expert_too_many_is_named(tiny_models: dict[str, Path], tmp_path: Path, refusal: Refusal) -> None:
    copy = Path(shutil.copytree(tiny_models["qwen3_moe"], tmp_path / "model"))
    edit_config(copy, num_local_experts=5)
    assert "experts.5.down_proj.weight is of one more than 5 experts" in refusal(copy)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float64, "float64"), (torch.int8, "int8"), (torch.uint8, "uint8"), (torch.float8_e4m3fn, "float8_e4m3fn")],
)
def test_other_dtypes_are_refused(copy: Path, dtype: torch.dtype, name: str, refusal: Refusal) -> None:
    tensor = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(copy, lambda tensors: tensors.update({tensor: tensors[tensor].to(dtype)}))
    expected = f"model: tensor {tensor} in {weights(copy)} is {name}; float32, float16 or bfloat16 is needed"
    assert refusal(copy) == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_loaded_and_buffers_of_old_checkpoints_are_ignored(copy: Path, dtype: torch.dtype) -> None:
    edit_tensors(copy, lambda tensors: tensors.update({name: x.to(dtype) for name, x in tensors.items()}))
    edit_tensors(copy, having("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(16, dtype=torch.float64)))
    load(copy)
    assert problems(copy) == []


def test_a_head_beside_the_embedding_that_it_is_tied_to(tmp_path: Path, foreign_lines: list[str]) -> None:
    copy = write_model(tmp_path, "llama", tie_word_embeddings=True)
    head = load_file(weights(copy))["model.embed_tokens.weight"].clone()
    load(edit_tensors(copy, having("lm_head.weight", head)))
    head[3, 5] += 1.0
    edit_tensors(copy, having("lm_head.weight", head))
    with pytest.raises(ModelError, match=r"lm_head.weight is not the embedding, .* \(tie_word_embeddings\)"):
        load(copy)
    assert foreign_lines == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_weights_that_are_not_finite_are_refused(
    kind: str, value: float, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(tiny_models[kind], tmp_path / "model"))
    name = next(name for name in load_file(weights(copy)) if name.endswith(("1.mlp.down_proj.weight", "1.w2.weight")))
    edit_tensors(copy, lambda tensors: tensors[name][3].fill_(value))
    assert refused(ModelError, load, copy) == f"model: tensor {name} in {weights(copy)} holds NaN or infinity"


def test_weights_too_large_for_their_dtype_are_refused(copy: Path) -> None:
    edit_tensors(copy, lambda tensors: tensors["model.norm.weight"][3].fill_(3.4e38))
    load(copy)
    with pytest.raises(ModelError, match=r"model.norm.weight in .* holds values too large for bfloat16"):
        load(copy, torch.bfloat16)


def test_shards_are_read_together(copy: Path, refusal: Refusal) -> None:
    tensors, names = load_file(weights(copy)), ("model-1.safetensors", "model-2.safetensors")
    weights(copy).unlink()
    parts: tuple[Tensors, Tensors] = {}, {}
    for place, (name, tensor) in enumerate(sorted(tensors.items())):
        parts[place % 2][name] = tensor
    for file, part in zip(names, parts, strict=True):
        save_file(part, copy / file, metadata={"format": "pt"})
    files = {name: file for file, part in zip(names, parts, strict=True) for name in part}
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    load(copy)
    assert problems(copy) == []
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(parts[0], names[0])}))
    assert "lacks tensor " in refusal(copy)
    index.write_text("[]")
    assert f"{index} holds a list" in refusal(copy)
    index.write_text(json.dumps({"weight_map": files}))
    assert f"{index} lacks weight_map or metadata" in refusal(copy)
    torch.save({}, copy / "weights.bin")  # a pickle
    index.write_text(json.dumps({"metadata": {}, "weight_map": {**files, "lm_head.weight": "weights.bin"}}))
    assert f"{index} names 'weights.bin'; weights are read from safetensors files alone" in refusal(copy)


# -- what is planned, and what the files hold

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
    check_weights(directory, load_config(directory))
    planned = footprint(directory, torch.float32, CPU, eager=True)
    headers = read_headers(weight_files(directory)).items()
    of_parameters = [tensor for name, (_, tensor) in headers if not name.endswith("correction_bias")]
    assert planned.parameters == sum(tensor.numel() for tensor in of_parameters)
    assert planned.weights == 4 * planned.parameters


@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, each) for kind in KINDS for each in (OPTIONS if kind in ALL_OPTIONS else OPTIONS[:1])],
    ids=str,
)
def test_as_many_weights_are_planned_as_the_files_hold(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    tiny_model(kind, **options).save_pretrained(tmp_path)
    assert_agreed(tmp_path)


def test_the_bundled_pair_is_whole() -> None:
    pair = resolve_pair("pycode")
    for directory in (pair.target, pair.draft):
        assert_agreed(directory)
