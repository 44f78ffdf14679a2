"""Loads a model directory in Hugging Face format for inference, or says in one line why it cannot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from pilotfish.config import Quantization
from pilotfish.errors import ModelError, ParameterError
from pilotfish.model import attention, experts, graphs, native  # noqa: F401  # attention registers itself
from pilotfish.model.checkpoint import check_weights, refuse_non_finite
from pilotfish.model.features import LayerGroup, layer_groups, refuse_nonsense, refuse_unsupported
from pilotfish.model.metadata import GenerationConfig, eos_ids, one_line, quiet, read_generation_config, read_object
from pilotfish.model.native_modules import with_kernels
from pilotfish.model.quantize import check_quantization, quantize
from pilotfish.model.serving_imports import without_decompositions

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ModelShape:
    vocab_size: int
    context: int  # positions
    layers: int
    kv_heads: int  # of every layer
    head_dim: int  # of every layer
    groups: tuple[LayerGroup, ...]  # which layers see how far back


@dataclass(frozen=True)
class LoadedModel:
    module: torch.nn.Module
    shape: ModelShape
    generation: GenerationConfig
    num_parameters: int
    dtype: torch.dtype
    device: torch.device
    native: bool  # whether the C++ kernels run it
    recordable: bool  # whether CUDA graphs can record it


def load_model(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    eager: bool,
    quantization: Quantization = "none",
    max_model_len: int = 0,
) -> LoadedModel:
    """ModelError for a model that is incomplete, corrupt or not supported, ParameterError for a quantization that the
    device lacks, or a `max_model_len` above the model's context."""
    check_quantization(quantization, dtype, device)
    config = load_config(directory)
    shape = shape_of(config, directory, max_model_len)
    generation = read_generation_config(directory, config.eos_token_id, shape.vocab_size)
    if device.type == "cuda":
        graphs.use_reproducible_products()
    config._attn_implementation = "pilotfish_reference" if eager else "pilotfish"
    config.output_router_logits = False  # for training only
    module = _load_weights(directory, config, dtype).to(device).eval().requires_grad_(False)
    refuse_non_finite(module, directory)
    _refuse_untied(module, config, directory)
    parameters = sum(p.numel() for p in module.parameters())
    use_native = runs_native(shape, device, eager=eager)
    if quantization != "none":
        experts.refuse_quantized(module, quantization)
        quantize(module, quantization)
    if use_native:
        module = with_kernels(module, shape.context)
    else:
        experts.replace_modules(module, experts.library_mixture)
    _own_memory(module)
    recordable = not eager and device.type == "cuda" and graphs.recordable(config)
    return LoadedModel(module, shape, generation, parameters, dtype, device, use_native, recordable)


def load_config(directory: Path) -> Any:
    """The model's configuration; ModelError unless its architecture is served."""
    path = directory / "config.json"
    if not path.is_file():
        raise ModelError(f"model: {directory} has no config.json; a Hugging Face model directory is needed")
    fields = read_object(path)
    refuse_nonsense(fields, path)
    eos_ids(path, fields.get("eos_token_id"), vocab_size=None)  # one line, where transformers' error has three
    try:
        with quiet():
            config = AutoConfig.from_pretrained(directory)
    except Exception as error:  # errors in files and fields have no common base
        raise ModelError(f"model: {path} cannot be read: {one_line(error)}") from error
    refuse_unsupported(config, directory)
    return config


def runs_native(shape: ModelShape, device: torch.device, *, eager: bool) -> bool:
    """Whether the C++ kernels run such a model. Builds them if they are not built yet."""
    return not eager and device.type == "cpu" and shape.head_dim % native.PANEL == 0 and native.load_kernels()


def shape_of(config: Any, directory: Path, max_model_len: int = 0) -> ModelShape:
    """Its context is `max_model_len` unless that is 0; ParameterError for more than the model's. ModelError for heads
    that do not divide."""
    if max_model_len > config.max_position_embeddings:
        allowed = f"at most {config.max_position_embeddings}, the model's context"
        raise ParameterError("max_model_len", max_model_len, allowed)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % kv_heads:
        raise ModelError(f"model: {directory}: {heads} attention heads do not divide into {kv_heads} KV heads")
    return ModelShape(
        vocab_size=config.vocab_size,
        context=max_model_len or config.max_position_embeddings,
        layers=config.num_hidden_layers,
        kv_heads=kv_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        groups=layer_groups(config),
    )


def _load_weights(directory: Path, config: Any, dtype: torch.dtype) -> torch.nn.Module:
    check_weights(directory, config)
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


def _own_memory(module: torch.nn.Module) -> None:
    """Copy tensors out of the mapped weight files, so that their pages can go. Tied tensors stay tied."""
    copies: dict[int, Any] = {}
    for part in module.modules():
        for tensors in (vars(part), part._parameters, part._buffers):
            for name, value in tensors.items():
                if isinstance(value, Tensor) and value.device.type == "cpu":
                    if id(value) not in copies:
                        copies[id(value)] = _copied(value)
                    tensors[name] = copies[id(value)]


def _copied(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    return torch.nn.Parameter(copy, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else copy
