import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.initialization import no_init_weights
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import LoadStateDictConfig, LoadStateDictInfo, load_state_dict

from pilotfish.errors import ModelError
from pilotfish.model.loading.metadata import one_line, quiet
from pilotfish.model.loading.multimodal import text_name
from pilotfish.model.loading.packed_tensors import FLOATS, Headers, dense_headers, packed_tensors
from pilotfish.model.loading.schemes import scheme_of
from pilotfish.model.loading.tensors import GGUF_INDEX, gguf_index, weight_files


def read_headers(files: Sequence[Path]) -> Headers:
    headers: dict[str, tuple[Path, Tensor]] = {}
    for file in files:
        try:
            tensors = load_state_dict(file, map_location="meta")
        except (OSError, SafetensorError, ValueError) as error:  # ValueError: a dtype that torch lacks
            raise ModelError(f"model: weights in {file} cannot be read: {one_line(error)}") from error
        headers |= {name: (file, tensor) for name, tensor in tensors.items()}
    return headers


def check_weights(directory: Path, config: Any) -> None:
    """ModelError, naming the first tensor, unless the files hold exactly what the architecture needs. Loads no
    values."""
    if config.quant_method == "gguf" and not gguf_index(directory):
        raise ModelError(f"model: {directory} has no {GGUF_INDEX}; give the GGUF file")
    if config.quant_method == "gguf":
        return  # what made the directory has compared them
    found, scheme, further = read_headers(weight_files(directory)), scheme_of(directory), _further_layers(config)
    named = {own: header for name, header in found.items() if (own := text_name(name, config))}
    headers: Headers = {name: header for name, header in named.items() if not name.startswith(further)}
    packed = {} if scheme is None else packed_tensors(headers, scheme)
    headers = dense_headers(headers, packed)
    _refuse_expert_gaps(directory, headers, config)
    info, ignored = _load_without_values(headers, config)
    if scheme is not None and scheme.layout == "columns":  # AutoGPTQ writes zeros where a model has no biases
        info.unexpected_keys -= {f"{name.removesuffix('.weight')}.bias" for name in packed}
    for name, (file, tensor) in headers.items():
        if tensor.dtype not in FLOATS and name not in ignored | info.unexpected_keys:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(f"model: tensor {name} in {file} is {dtype}; float32, float16 or bfloat16 is needed")
    wrong = [f"{name} has shape {list(has)}; {list(needs)} is needed" for name, has, needs in info.mismatched_keys]
    unjoined = [f"{name} cannot be joined of the tensors that are there" for name in info.conversion_errors]
    for problems, sentence in (
        (sorted(info.unexpected_keys), ": tensor {} has no place in the model of its config.json"),
        (sorted(info.missing_keys - set(info.conversion_errors)), " lacks tensor {}, which its config.json needs"),
        (sorted(wrong + unjoined), ": tensor {}"),
    ):
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise ModelError(f"model: {directory}{sentence.format(problems[0])}{more}")


def _further_layers(config: Any) -> tuple[str, ...]:
    """How the tensors of layers begin that guess further tokens (MTP): they may be there, and are left out."""
    own, further = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0
    return tuple(f"model.layers.{layer}." for layer in range(own, own + further))


def _load_without_values(headers: Headers, config: Any) -> tuple[LoadStateDictInfo, set[str]]:
    module = meta_module(config)
    with quiet():
        tensors = {name: tensor for name, (_, tensor) in headers.items()}
        info = load_converted(module, tensors, device_map={"": "meta"}, dtype=module.dtype)
        found = set(info.unexpected_keys)
        module._adjust_missing_and_unexpected_keys(info)
    return info, found - info.unexpected_keys


def load_converted(module: Any, tensors: Mapping[str, Any], **options: Any) -> LoadStateDictInfo:
    """transformers renames and joins the files' `tensors`."""
    mapping = get_model_conversion_mapping(module)
    how = LoadStateDictConfig(weight_mapping=mapping, **options)
    info, _ = convert_and_load_state_dict_in_model(module, tensors, how)
    module.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    return info


@contextmanager
def without_decompositions() -> Iterator[None]:
    """On `meta`, random numbers and `torch.arange` would make torch import its compiler and sympy: over a second of
    work. Longrope multiplies what it gives."""
    arange, longrope = torch.arange, ROPE_INIT_FUNCTIONS["longrope"]
    torch.arange, ROPE_INIT_FUNCTIONS["longrope"] = partial(arange, device="cpu"), partial(longrope, device="cpu")
    try:
        with no_init_weights():
            yield
    finally:
        torch.arange, ROPE_INIT_FUNCTIONS["longrope"] = arange, longrope


def meta_module(config: Any) -> Any:
    with torch.device("meta"), without_decompositions():
        module = AutoModelForCausalLM.from_config(config)
    module.tie_weights()  # part of the initialization that is left out
    return module


def linear_weights(module: torch.nn.Module) -> list[Tensor]:
    """[outputs, inputs] each, the head's last. Routers and experts are no linear layers."""
    return [part.weight for part in module.modules() if isinstance(part, torch.nn.Linear)]


def _refuse_expert_gaps(directory: Path, headers: Headers, config: Any) -> None:
    """ModelError unless all experts of a layer have the same tensors: transformers would join those that are there."""
    count = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0
    matches = (re.fullmatch(r"(.*\.experts)\.(\d+)\.(.+)", name) for name in headers)
    experts = [(found[1], int(found[2]), found[3]) for found in matches if found]
    for prefix, index, part in experts:
        if index >= count:
            raise ModelError(f"model: {directory}: tensor {prefix}.{index}.{part} is of one more than {count} experts")
    for prefix, part in sorted({(prefix, part) for prefix, _, part in experts}):
        for index in range(count):
            if (name := f"{prefix}.{index}.{part}") not in headers:
                raise ModelError(f"model: {directory} lacks tensor {name}, which its config.json needs")


def refuse_non_finite(module: Any, directory: Path) -> None:
    """ModelError for a loaded weight with NaN or infinity; names the tensor in the files."""
    for name, weight in module.state_dict().items():  # parameters, and buffers that the files hold
        low, high = weight.aminmax()  # NaN where there is one
        if not (math.isfinite(low.item()) and math.isfinite(high.item())):
            found = _non_finite(directory, module.config, weight.dtype)
            raise ModelError(next(found, f"model: {directory}: {name} is not finite"))


def _non_finite(directory: Path, config: Any, dtype: torch.dtype) -> Iterator[str]:
    for file in weight_files(directory):
        with safe_open(file, framework="pt") as opened:
            for name in filter(partial(text_name, config=config), opened.keys()):
                tensor = opened.get_tensor(name)
                if tensor.dtype not in FLOATS:
                    continue
                if not tensor.isfinite().all():
                    yield f"model: tensor {name} in {file} holds NaN or infinity"
                elif not tensor.to(dtype).isfinite().all():
                    yield f"model: tensor {name} in {file} holds values too large for {str(dtype)[6:]}"
