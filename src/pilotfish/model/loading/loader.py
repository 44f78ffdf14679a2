from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from pilotfish.config.fields import KVDType, Quantization
from pilotfish.errors import ModelError, ParameterError
from pilotfish.model import attention, experts  # noqa: F401  # attention and experts register themselves
from pilotfish.model.collective import Group, join_ranks
from pilotfish.model.cuda.graphs import recordable
from pilotfish.model.devices import kernels_of
from pilotfish.model.grouped import GroupedLinear
from pilotfish.model.kernels import Kernels
from pilotfish.model.kv_planes import element_type
from pilotfish.model.loading.checkpoint import check_weights, refuse_non_finite, without_decompositions
from pilotfish.model.loading.configuration import has_latents, key_size, load_config
from pilotfish.model.loading.footprint import scored_cost
from pilotfish.model.loading.metadata import GenerationConfig, one_line, quiet, read_generation_config
from pilotfish.model.loading.packed_weights import dequantize, load_packed
from pilotfish.model.loading.quantize import check_quantization, quantize
from pilotfish.model.loading.shards import Shard, load_shard, part_config, refuse_indivisible

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    module: torch.nn.Module
    config: Any  # transformers', as `load_config` gives it
    part: Any  # of what this process holds: the same, or that of a rank
    generation: GenerationConfig
    dtype: torch.dtype
    kv_dtype: torch.dtype  # of the elements of its KV
    device: torch.device
    kernels: Kernels
    recordable: bool = False  # whether `kernels` may record its forward
    scored_cost: float = 1.0  # of a row with log-probabilities, in rows without logits

    @property
    def native(self) -> bool:
        return self.kernels.native


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
    """A whole model or, with a `group` (which need not be connected yet), this rank's shard. ModelError for a model
    that is incomplete, corrupt or not supported; ParameterError for options that the device or the model lacks."""
    config = load_config(directory, max_model_len)
    check_quantization(quantization, dtype, device, config.quant_method)
    kv_elements = element_type(kv_dtype, dtype, device)
    generation = read_generation_config(directory, config.eos_token_id, config.vocab_size)
    if has_latents(config) and device.type == "cuda" and not eager:
        raise ParameterError("device", str(device), f"--eager for a {config.architectures[0]}: no kernel takes latents")
    kernels = kernels_of(device, key_size(config), eager=eager)
    config._attn_implementation = "pilotfish"
    config._experts_implementation = "pilotfish"  # `experts.library_mixture`
    config.output_router_logits = False  # for training only
    module: Any = load_weights(directory, config, dtype, group)
    if module.model.rotary_emb.rope_type == "longrope":
        module.model.rotary_emb.rope_type = "default"  # `load_config` has chosen its angles, once
    if device.type != "cpu":
        dequantize(module)
    module = module.to(device).eval().requires_grad_(False)
    cost = scored_cost(module, config)
    refuse_non_finite(module, directory)
    if config.quant_method != "gguf":
        _refuse_untied(module, config, directory)
    if quantization != "none":
        quantize(module, quantization)
    module = kernels.replace(module, config.context, alone=group is None)
    if group is not None:
        join_ranks(module, config, group)
    if device.type == "cpu":
        for tensor in chain(module.parameters(), module.buffers()):
            tensor.data = tensor.data.clone()  # out of the mapped weight files, so that their pages can go
        for linear in (part for part in module.modules() if isinstance(part, GroupedLinear)):
            linear.weight = replace(linear.weight, codes=linear.weight.codes.clone())
    records = group is None and kernels.records and recordable(config)
    part = config if group is None else part_config(config, group.shard)
    return LoadedModel(module, config, part, generation, dtype, kv_elements, device, kernels, records, cost)


def load_weights(directory: Path, config: Any, dtype: torch.dtype, group: Group | None = None) -> torch.nn.Module:
    check_weights(directory, config)
    if group is not None:
        refuse_indivisible(config, group.shard.ranks)
        return load_shard(directory, config, dtype, group.shard)  # type: ignore[no-any-return]
    if hasattr(config, "text_of"):
        return load_shard(directory, config, dtype, Shard())  # type: ignore[no-any-return]
    if config.quant_method:
        return load_packed(directory, config, dtype)  # type: ignore[no-any-return]
    try:
        with quiet(), without_decompositions():
            return AutoModelForCausalLM.from_pretrained(  # type: ignore[no-any-return]
                directory, config=config, dtype=dtype, use_safetensors=True
            )
    except Exception as error:  # safetensors, torch and OS errors have no common base
        raise ModelError(f"model: weights in {directory} cannot be loaded: {one_line(error)}") from error


def load_dense(directory: Path, config: Any, dtype: torch.dtype) -> torch.nn.Module:
    module = load_weights(directory, config, dtype)
    dequantize(module)
    return module.requires_grad_(True)


def _refuse_untied(module: Any, config: Any, directory: Path) -> None:
    """ModelError for a separate head although config.json ties it: transformers would serve that head."""
    head, embedding = module.get_output_embeddings().weight, module.get_input_embeddings().weight
    if config.tie_word_embeddings and head is not embedding:
        raise ModelError(
            f"model: {directory}: tensor lm_head.weight is not the embedding, "
            "which config.json says it is (tie_word_embeddings)"
        )
