"""Reads no weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pilotfish.config.fields import KVDType, Quantization
from pilotfish.model.cpu import native
from pilotfish.model.cpu.native import runs_native
from pilotfish.model.experts import expert_parts, stacked_experts
from pilotfish.model.kv_planes import element_type
from pilotfish.model.loading.checkpoint import linear_weights, meta_module
from pilotfish.model.loading.configuration import ARCHITECTURES, has_latents, kept_heads, key_size, load_config
from pilotfish.model.loading.packed_weights import saved_bytes
from pilotfish.model.loading.shards import Shard, part_config, refuse_indivisible

#: Bytes per weight of the layer that is quantized: its codes, and copies in float32.
_QUANTIZING = 13
#: Bytes per logit in sampling: its float32, and float64 scores before and after the filters.
_SAMPLING = 4 + 8 + 8
#: More of recorded forwards: what a graph writes, and the next forward's in float32.
_RECORDED = 4 + 4
#: Weights that a row is multiplied with, at most, while one of its logits is looked at for log-probabilities: 60 with
#: AVX-512's products of bfloat16.
_SCORING = 128


@dataclass(frozen=True)
class Footprint:
    parameters: int  # a number; all others are bytes
    weights: int
    slot: int  # a token's keys and values
    row: int  # of a forward, while it runs: activations, logits, sampling
    loading: int  # at most, beside the weights, while they are quantized


def footprint(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    eager: bool,
    quantization: Quantization = "none",
    kv_dtype: KVDType = "auto",
    max_model_len: int = 0,
    ranks: int = 1,
) -> Footprint:
    """Of rank 0, which has all logits. Raises `load_model`'s errors that need no weights."""
    config = load_config(directory, max_model_len)
    refuse_indivisible(config, ranks)
    part = part_config(config, Shard(0, ranks))
    size, packed = dtype.itemsize, runs_native(key_size(config), device, eager=eager)
    module = meta_module(part)
    *inner_linears, head = linear_weights(module)
    inner = max(*map(len, inner_linears), part.num_attention_heads * key_size(part))
    whole_decoder = packed or (device.type == "cuda" and not eager)
    plain = whole_decoder and ranks == 1 and ARCHITECTURES[config.architectures[0]].get("plain", False)
    weights = _weight_bytes(module, dtype, packed=packed, quantized=quantization != "none")
    if config.quant_method and device.type == "cpu":
        weights -= saved_bytes(directory, module, size, packed=packed)
    angles = 2 * config.context * config.head_dim * size * plain
    return Footprint(
        parameters=sum(weight.numel() for weight in meta_module(config).parameters()),
        weights=weights + angles,
        slot=slot_bytes(part, element_type(kv_dtype, dtype, device).itemsize),
        row=size * (8 * config.hidden_size + (1 if packed else 3) * inner + config.vocab_size)
        + (_SAMPLING + _RECORDED * (device.type == "cuda" and not eager)) * config.vocab_size
        + size * (ranks > 1) * (ranks * config.hidden_size + 2 * config.vocab_size),  # everybody's parts
        loading=0 if quantization == "none" else _QUANTIZING * max(weight.numel() for weight in (*inner_linears, head)),
    )


def _weight_bytes(module: Any, dtype: torch.dtype, *, packed: bool, quantized: bool) -> int:
    """Packed and quantized heads are never the embedding; a quantized weight takes a byte, and an output a float32
    scale. Packed weights are padded to whole panels, and those of experts, which are small, to whole tiles."""
    size, count = dtype.itemsize, sum(weight.numel() for weight in module.parameters())
    if module.config.tie_word_embeddings and (packed or quantized):
        count += module.lm_head.weight.numel()
    saved = sum((size - 1) * weight.numel() - 4 * len(weight) for weight in linear_weights(module) if quantized)
    downs = [(x.num_experts, expert_parts(x, 0)[1].weight) for x in stacked_experts(module) if packed]
    multiples = 2 * [native.PANEL] + [native.input_multiple(dtype)]  # of gate, up and down
    padding = sum(experts * len(down) * (-down.shape[1] % of) for experts, down in downs for of in multiples)
    matrices = [x for name, x in module.named_parameters() if name.endswith(".weight") and x.ndim == 2 and packed]
    padding += sum(-len(x) % native.PANEL * x.shape[1] for x in matrices)
    return int(size * (count + padding) - saved)


def slot_bytes(config: Any, size: int) -> int:
    """Of a token's keys and values, in elements of `size` bytes; heads of 8-bit elements have a float32 scale."""
    planes, head = 1 if has_latents(config) else 2, key_size(config) * size + (4 if size == 1 else 0)
    return int(config.num_hidden_layers * planes * kept_heads(config) * head)


def scored_cost(module: Any, config: Any) -> float:
    """Of a row with log-probabilities, in rows without logits."""
    head, linears = module.lm_head.weight.numel(), sum(weight.numel() for weight in linear_weights(module))
    mixtures = stacked_experts(module)
    chosen = sum(p.numel() * config.num_experts_per_tok // m.num_experts for m in mixtures for p in m.parameters())
    return float(1 + (head + _SCORING * config.vocab_size) / (linears - head + chosen))
