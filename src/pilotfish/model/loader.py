"""Loads a model directory in Hugging Face format for inference, or says in one line why it cannot; and says what memory
that would take."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pilotfish.config.fields import KVDType, Quantization
from pilotfish.errors import ModelError, ParameterError
from pilotfish.model import attention, experts, graphs, native  # noqa: F401  # attention and experts register themselves
from pilotfish.model.checkpoint import check_weights, meta_module, refuse_non_finite, without_decompositions
from pilotfish.model.collective import Group, join_ranks
from pilotfish.model.features import ARCHITECTURES, refuse_nonsense, refuse_unsupported
from pilotfish.model.kv_planes import element_type, slot_bytes
from pilotfish.model.metadata import GenerationConfig, eos_ids, one_line, quiet, read_generation_config, read_object
from pilotfish.model.native_modules import with_kernels
from pilotfish.model.quantize import check_quantization, quantize
from pilotfish.model.shards import Shard, load_shard, part_config, refuse_indivisible

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: Bytes per weight of the layer that torchao quantizes: its own, and copies in float32.
_QUANTIZING = 14
#: Weights that a row is multiplied with, at most, while one of its logits is looked at for log-probabilities: 60 with
#: AVX-512's products of bfloat16.
_SCORING = 128
#: Bytes per logit in sampling: its float32, and float64 scores before and after the filters.
_SAMPLING = 4 + 8 + 8


@dataclass(frozen=True)
class LoadedModel:
    module: torch.nn.Module
    config: Any  # transformers', as `load_config` gives it
    part: Any  # of what this process holds: the same, or that of a rank
    generation: GenerationConfig
    dtype: torch.dtype
    kv_dtype: torch.dtype  # of the elements of its KV
    device: torch.device
    native: bool  # whether the C++ kernels run it
    recordable: bool  # whether CUDA graphs can record it
    scored_cost: float = 1.0  # of a row with log-probabilities, in rows without logits


def load_model(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    eager: bool,
    quantization: Quantization = "none",
    kv_dtype: KVDType = "auto",
    max_model_len: int = 0,
    group: Group | None = None,
) -> LoadedModel:
    """All of a model or, with a `group`, which need not be connected yet, this rank's shard. ModelError for a model
    that is incomplete, corrupt or not supported, ParameterError for a quantization that the device lacks, of weights or
    of KV, a `max_model_len` above the model's context, or ranks that it does not divide into."""
    check_quantization(quantization, dtype, device)
    kv_elements = element_type(kv_dtype, dtype, device)
    config = load_config(directory, max_model_len)
    generation = read_generation_config(directory, config.eos_token_id, config.vocab_size)
    if device.type == "cuda":
        graphs.use_reproducible_products()
    config._attn_implementation = "pilotfish_reference" if eager else "pilotfish"
    config._experts_implementation = "pilotfish"  # `experts.library_mixture`
    config.output_router_logits = False  # for training only
    module = load_weights(directory, config, dtype, group).to(device).eval().requires_grad_(False)
    scored_cost = _scored_cost(module, config)
    refuse_non_finite(module, directory)
    _refuse_untied(module, config, directory)
    use_native = runs_native(config, device, eager=eager)
    if quantization != "none":
        quantize(module, quantization)
    if use_native:
        module = with_kernels(module, config.context, alone=group is None)
    if group is not None:
        join_ranks(module, config, group)
    if device.type == "cpu":
        for tensor in chain(module.parameters(), module.buffers()):
            tensor.data = tensor.data.clone()  # out of the mapped weight files, so that their pages can go
    recordable = not eager and device.type == "cuda" and group is None and graphs.recordable(config)
    part = config if group is None else part_config(config, group.shard)
    kinds = dtype, kv_elements, device
    return LoadedModel(module, config, part, generation, *kinds, use_native, recordable, scored_cost)


def _scored_cost(module: Any, config: Any) -> float:
    """As `LoadedModel` has it: by the weights that a row is multiplied with."""
    head, modules = module.lm_head.weight.numel(), [*module.modules()]
    linears = sum(m.weight.numel() for m in modules if isinstance(m, torch.nn.Linear))
    mixtures = [m for m in modules if type(m).__name__.endswith("Experts")]
    chosen = sum(p.numel() * config.num_experts_per_tok // m.num_experts for m in mixtures for p in m.parameters())
    return float(1 + (head + _SCORING * config.vocab_size) / (linears - head + chosen))


def load_config(directory: Path, max_model_len: int = 0) -> Any:
    """The model's configuration, with its `num_key_value_heads`, `head_dim` and `context`: `max_model_len` positions
    unless that is 0. ModelError unless it is served, ParameterError for more positions than the model's."""
    path = directory / "config.json"
    if not path.is_file():
        raise ModelError(f"model: {directory} has no config.json; a Hugging Face model directory is needed")
    fields = read_object(path)
    refuse_nonsense(fields, path)
    eos_ids(path, fields.get("eos_token_id"), vocab_size=None)  # one line, where transformers' error has three
    try:
        config = deepcopy(_parsed(directory, path.read_bytes()))
    except Exception as error:  # errors in files and fields have no common base
        raise ModelError(f"model: {path} cannot be read: {one_line(error)}") from error
    refuse_unsupported(config, directory)
    _complete(config, directory, max_model_len)
    return config


@lru_cache(maxsize=16)
def _parsed(directory: Path, text: bytes) -> Any:  # noqa: ARG001  # what the directory's config.json holds
    """transformers' configuration of a directory: a start asks for it a dozen times, and transformers is slow."""
    with quiet():
        return AutoConfig.from_pretrained(directory)


def _complete(config: Any, directory: Path, max_model_len: int) -> None:
    heads = config.num_attention_heads
    config.num_key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if heads % config.num_key_value_heads:
        divided = f"{heads} attention heads do not divide into {config.num_key_value_heads} KV heads"
        raise ModelError(f"model: {directory}: {divided}")
    if max_model_len > config.max_position_embeddings:
        allowed = f"at most {config.max_position_embeddings}, the model's context"
        raise ParameterError("max_model_len", max_model_len, allowed)
    config.context = max_model_len or config.max_position_embeddings


def runs_native(config: Any, device: torch.device, *, eager: bool) -> bool:
    """Whether the C++ kernels run such a model. Builds them if they are not built yet."""
    return not eager and device.type == "cpu" and config.head_dim % native.PANEL == 0 and native.load_kernels()


def load_weights(directory: Path, config: Any, dtype: torch.dtype, group: Group | None = None) -> torch.nn.Module:
    check_weights(directory, config)
    if group is not None:
        refuse_indivisible(config, group.shard.ranks)
        return load_shard(directory, config, dtype, group.shard)  # type: ignore[no-any-return]
    try:
        with quiet(), without_decompositions():
            return AutoModelForCausalLM.from_pretrained(  # type: ignore[no-any-return]
                directory, config=config, dtype=dtype, use_safetensors=True
            )
    except Exception as error:  # safetensors, torch and OS errors have no common base
        raise ModelError(f"model: weights in {directory} cannot be loaded: {one_line(error)}") from error


def _refuse_untied(module: Any, config: Any, directory: Path) -> None:
    """ModelError if the files hold a separate head although the configuration ties it to the embedding: transformers
    would serve that head."""
    head, embedding = module.get_output_embeddings().weight, module.get_input_embeddings().weight
    if config.tie_word_embeddings and head is not embedding:
        raise ModelError(
            f"model: {directory}: tensor lm_head.weight is not the embedding, "
            "which config.json says it is (tie_word_embeddings)"
        )


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
    """Of the model as `load_model` would keep it, with the same errors; of several ranks, that of rank 0, which has all
    logits. Reads no weights."""
    config = load_config(directory, max_model_len)
    refuse_indivisible(config, ranks)
    whole, part = meta_module(config, dtype), part_config(config, Shard(0, ranks))
    module = whole if ranks == 1 else meta_module(part, dtype)
    size, packed = dtype.itemsize, runs_native(config, device, eager=eager)
    linears = [m for m in module.modules() if isinstance(m, torch.nn.Linear)]
    inner = max(m.out_features for m in linears if m is not module.lm_head)
    plain = packed and ranks == 1 and ARCHITECTURES[type(module).__name__].get("plain", False)
    angles = 2 * config.context * config.head_dim * size * plain
    return Footprint(
        parameters=sum(p.numel() for p in whole.parameters()),
        weights=_weight_bytes(module, packed=packed, quantized=quantization != "none") + angles,
        slot=slot_bytes(part, element_type(kv_dtype, dtype, device)),
        row=size * (8 * config.hidden_size + (1 if packed else 3) * inner + config.vocab_size)
        + _SAMPLING * config.vocab_size
        + size * (ranks > 1) * (ranks * config.hidden_size + 2 * config.vocab_size),  # everybody's parts
        loading=0 if quantization == "none" else _QUANTIZING * max(m.weight.numel() for m in linears),
    )


def _weight_bytes(module: Any, *, packed: bool, quantized: bool) -> int:
    """Of all weights. Packed and quantized heads are never the embedding; a quantized weight takes a byte, and an
    output a float32 scale. Packed ones are padded to whole panels of outputs and tiles of inputs, which counts for
    small experts only."""
    size, hidden = module.dtype.itemsize, module.config.hidden_size
    weights = [*module.parameters()]
    if (packed or quantized) and module.config.tie_word_embeddings:
        weights.append(module.lm_head.weight)
    linears = [m for m in module.modules() if isinstance(m, torch.nn.Linear) and quantized]
    saved = sum((size - 1) * m.weight.numel() - 4 * m.out_features for m in linears)
    downs = [m.down_proj for m in module.modules() if type(m).__name__.endswith("Experts") and packed]
    multiples = 2 * [native.PANEL] + [native.input_multiple(module.dtype)]  # of gate, up and down
    padding = sum(len(down) * hidden * (-(down[0].numel() // hidden) % of) for down in downs for of in multiples)
    return int(size * (sum(p.numel() for p in weights) + padding) - saved)
