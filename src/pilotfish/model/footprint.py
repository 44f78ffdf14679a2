"""Bytes that a model takes, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pilotfish.config import Quantization
from pilotfish.model import native
from pilotfish.model.checkpoint import meta_module
from pilotfish.model.loader import load_config, runs_native, shape_of
from pilotfish.model.native_modules import PLAIN

#: Bytes per weight of the layer that torchao quantizes: its own, and copies in float32.
_QUANTIZING = 14
#: Bytes per logit in sampling: its float32, and float64 scores before and after the filters.
_SAMPLING = 4 + 8 + 8


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
    max_model_len: int = 0,
) -> Footprint:
    """Of the model as `load_model` would keep it, with the same errors. Reads no weights."""
    config = load_config(directory)
    shape = shape_of(config, directory, max_model_len)
    module = meta_module(config, dtype)
    size, hidden = dtype.itemsize, config.hidden_size
    packed = runs_native(shape, device, eager=eager)
    sizes = _Sizes(size, packed, quantization != "none", bool(config.tie_word_embeddings))
    linears = [m for m in module.modules() if isinstance(m, torch.nn.Linear)]
    inner = max(m.out_features for m in linears if m is not module.lm_head)
    angles = 2 * shape.context * shape.head_dim * size if packed and type(module).__name__ in PLAIN else 0
    return Footprint(
        parameters=sum(p.numel() for p in module.parameters()),
        weights=sum(sizes.of(m, head=m is module.lm_head) for m in module.modules()) + angles,
        slot=2 * shape.layers * shape.kv_heads * shape.head_dim * size,
        row=size * (8 * hidden + (1 if packed else 3) * inner + shape.vocab_size) + _SAMPLING * shape.vocab_size,
        loading=0 if quantization == "none" else _QUANTIZING * max(m.in_features * m.out_features for m in linears),
    )


@dataclass(frozen=True)
class _Sizes:
    element: int  # bytes
    packed: bool
    quantized: bool
    tied: bool

    def of(self, module: Any, *, head: bool) -> int:
        """Bytes of a module's own weights, without those of its children."""
        own = list(module.parameters(recurse=False))
        if type(module).__name__.endswith("Experts"):
            return self._experts(module)
        if not isinstance(module, torch.nn.Linear):
            return int(sum(p.numel() for p in own)) * self.element
        if head and self.tied and not self.packed and not self.quantized:
            return 0  # the embedding's
        bias = 0 if module.bias is None else module.out_features * self.element
        return self._linear(module.out_features, module.in_features) + bias

    def _experts(self, module: Any) -> int:
        """Bytes of stacked experts: gate, up and down of each."""
        count, *down = module.down_proj.shape
        inner, outputs = down if module.is_transposed else reversed(down)
        products = 2 * self._linear(inner, outputs) + self._linear(outputs, inner)
        biases = sum(p.numel() for p in module.parameters(recurse=False) if p.dim() == 2)
        return int(count * products + biases * self.element)

    def _linear(self, outputs: int, inputs: int) -> int:
        element, scales = (1, 4 * outputs) if self.quantized else (self.element, 0)
        if self.packed:  # padded to whole panels and steps
            outputs += -outputs % native.PANEL
            inputs += inputs % 2 if self.element == 2 else 0
        return outputs * inputs * element + scales
