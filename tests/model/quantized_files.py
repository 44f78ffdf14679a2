"""Quantized checkpoints of tiny models, and what libraries make of their weights."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter, FP8BlockDequantizer
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from support import edit_config, weights
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

Tensors = dict[str, Tensor]
#: Writes a model's directory anew; returns the library's values of the weights that it quantized.
Writer = Callable[[Path, Path], Tensors]
#: Of a weight: the tensors in its place, by the endings of their names, and what a library makes of them.
Pack = Callable[[Tensor], tuple[Tensors, Tensor]]


def _blocks(weight: Tensor, rows: int, columns: int) -> Tensor:
    """[blocks, rows, blocks, columns], with zeros at the ends"""
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -inputs % columns, 0, -outputs % rows))
    return padded.view(len(padded) // rows, rows, -1, columns)


def compressed(model: Path, out: Path, ignore: tuple[str, ...] = ("lm_head",), **given: Any) -> Tensors:
    """By compressed-tensors; as LLM Compressor does it, for which it is made."""
    module: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    inputs = QuantizationArgs(**given.pop("inputs")) if "inputs" in given else None
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**given), input_activations=inputs)
    apply_quantization_config(module, QuantizationConfig(config_groups={"group_0": scheme}, ignore=[*ignore]))
    named = {f"{name}.weight": part for name, part in module.named_modules() if hasattr(part, "weight_scale")}
    for part in named.values():
        scale = part.weight_scale
        sizes = [-(-size // count) for size, count in zip(part.weight.shape, [*scale.shape, 1][:2], strict=True)]
        blocks = _blocks(part.weight.detach(), *sizes)
        scales, zeros = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), scheme.weights)
        scale.data = scales.view(scale.shape).to(scale.dtype)
        part.weight_zero_point.data = zeros.view(scale.shape).to(part.weight_zero_point.dtype)
    compressor = ModelCompressor.from_pretrained_model(module)
    compressor.compress_model(module)
    shutil.copytree(model, out)
    module.save_pretrained(out)
    compressor.update_config(out)
    compressor.decompress_model(module)
    return {name: part.weight.detach() for name, part in named.items()}


def packed(pack: Pack, about: dict[str, Any], model: Path, out: Path, part: str = "_proj") -> Tensors:
    """All weights with `part` in their names: linear layers of decoder layers, and their experts."""
    shutil.copytree(model, out)
    tensors, dense = load_file(weights(out)), Tensors()
    for name in [name for name in tensors if part in name and not name.endswith("bias")]:
        base = name.removesuffix(".weight")
        parts, dense[name] = pack(tensors.pop(name).float())
        tensors |= {base + ending: part.contiguous() for ending, part in parts.items()}
    save_file(tensors, weights(out), metadata={"format": "pt"})
    edit_config(out, quantization_config=about)
    return dense


def _float8(rows: int, columns: int, ending: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    """0: all"""
    outputs, inputs = weight.shape
    blocks = _blocks(weight, rows or outputs, columns or inputs)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(-1, blocks[0, 0].numel())
    codes, dequantizer = (
        codes[:outputs, :inputs].contiguous(),
        FP8BlockDequantizer(weight_block_size=(rows or outputs, columns or inputs), dtype=torch.float32),
    )
    values = dequantizer.process({"x.weight": codes, "x.weight_scale_inv": scales})["x.weight"]
    return {".weight": codes, ending: scales if rows else scales.view(())}, values


def _rounded(weight: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """[inputs, outputs] of codes; [groups, outputs] of scales in float16, and of zero points."""
    by_group = weight.T.reshape(-1, group, len(weight))
    low, high = by_group.amin(1), by_group.amax(1)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / (2**bits - 1)).half()
    zeros = torch.full_like(low, 2 ** (bits - 1)) if symmetric else (-low / scales).round().clamp(1, 2**bits - 1)
    codes = ((by_group / scales[:, None]).round() + zeros[:, None]).clamp(0, 2**bits - 1)
    return codes.flatten(0, 1).int(), scales, zeros.int()


def _words(codes: Tensor, bits: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """[rows, codes] -> [rows, words]; `order` of the codes of a word"""
    per = 32 // bits
    words = [codes.long()[:, order[i] :: per] << bits * i for i in range(per)]
    return torch.stack(words).sum(0).to(torch.int32).contiguous()


def _awq(group: int, weight: Tensor) -> tuple[Tensors, Tensor]:
    codes, scales, zeros = _rounded(weight, 4, group, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {".qweight": _words(codes, 4, order), ".qzeros": _words(zeros, 4, order), ".scales": scales}
    converted = AutoAWQConverter(group_size=group).process({f"x{name}": part for name, part in parts.items()})
    args = QuantizationArgs(num_bits=4, group_size=group, symmetric=False)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {name.removeprefix("x."): part for name, part in converted.items()}
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    return parts, compressor.decompress(state, scheme)["weight"]


def _gptq(bits: int, group: int, symmetric: bool, weight: Tensor) -> tuple[Tensors, Tensor]:
    """As AutoGPTQ's QuantLinear packs them, with a bias of zeros, and makes weights of them."""
    size = group if group > 0 else weight.shape[1]
    codes, scales, zeros = _rounded(weight, bits, size, symmetric)
    groups = torch.arange(len(codes), dtype=torch.int32) // size
    parts = {
        ".qweight": _words(codes.T, bits).T,
        ".qzeros": _words(zeros - 1, bits),
        ".scales": scales,
        ".g_idx": groups,
        ".bias": torch.zeros(len(weight), dtype=torch.float16),
    }
    return parts, (scales[groups] * (codes - zeros[groups])).T


def _mxfp4(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Any codes, with small factors."""
    experts, inputs, outputs = weight.shape
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16)).to(torch.uint8)
    scales = torch.randint(120, 124, blocks.shape[:3]).to(torch.uint8)
    return {"_blocks": blocks, "_scales": scales}, convert_moe_packed_tensors(blocks, scales)


_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
_BLOCKS = {**_FP8, "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}


def gptq(bits: int, group: int, symmetric: bool) -> Writer:
    about = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": False}
    return partial(packed, partial(_gptq, bits, group, symmetric), about | {"checkpoint_format": "gptq"})


FORMS: dict[str, Writer] = {
    "fp8 blocks": partial(packed, partial(_float8, 128, 128, ".weight_scale_inv"), _BLOCKS),
    "fp8 tensor": partial(packed, partial(_float8, 0, 0, ".weight_scale"), {**_FP8, "activation_scheme": "static"}),
    "fp8 channel": partial(packed, partial(_float8, 1, 0, ".weight_scale"), _FP8),
    "float tensor": partial(compressed, type="float", strategy="tensor", inputs={"type": "float"}),
    "float channel": partial(compressed, type="float", strategy="channel"),
    "float block": partial(compressed, type="float", strategy="block", block_structure=[128, 128]),
    "int8": partial(compressed, strategy="channel", inputs={"strategy": "token", "dynamic": True}),
    "int8 with zeros": partial(compressed, strategy="channel", symmetric=False, inputs={}),
    "packed": partial(compressed, num_bits=4, strategy="group", group_size=32),
    "packed with zeros": partial(compressed, num_bits=4, strategy="group", group_size=128, symmetric=False),
    "packed channel": partial(compressed, num_bits=4, strategy="channel"),
    "packed 8 bits": partial(compressed, num_bits=8, strategy="group", group_size=128),
    "awq": partial(packed, partial(_awq, 64), _AWQ),
    "gptq": gptq(4, 128, symmetric=True),
    "gptq with zeros": gptq(4, 32, symmetric=False),
    "gptq 8 bits": gptq(8, -1, symmetric=False),
}
mxfp4 = partial(packed, _mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, part="experts")
