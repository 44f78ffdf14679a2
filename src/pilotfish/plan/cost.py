"""The time of a forward on a device: a roofline of weights, products and KV, and a fixed cost a layer.

    seconds =   weight bytes / (bandwidth * 0.85)  +  2 * weights * rows / (peak * 0.6)
              + KV bytes / (bandwidth * 0.6)  +  layers * (layer + 2 all-reduces)

with bandwidth and peak of all devices together, among which tensor parallelism splits weights and KV. Reading weights
and multiplying are added, not overlapped: against published speed-ups by batch size (EAGLE-3 on one H100, batch 4 to
64) the sum is off by 8 % in the mean, the larger of the two by 25 %. The efficiencies are assumed, the fixed costs
fitted to one published rate each.

`catalog.toml` has accelerators by their vendors' figures, and public dense models by their published configurations.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path

#: Shares of the peak that are reached: streaming weights, reading KV, multiplying.
WEIGHTS_SHARE, KV_SHARE, PRODUCTS_SHARE = 0.85, 0.6, 0.6
BFLOAT16 = 2.0  # bytes
#: Seconds of a serving system beside the roofline: launches, attention, sampling and the host's part, all laid on
#: layers; one of a layer's two all-reduces, where several devices share it. Fitted to TensorRT-LLM's Llama-3.1 70B on
#: one and 405B on four H200 in FP8, batch 1: 51.14 and 33.46 tokens/s (NVIDIA, 2024).
LAYER, ALL_REDUCE = 28e-6, 6e-6


@dataclass(frozen=True)
class Device:
    memory: float  # bytes
    bandwidth: float  # bytes a second
    bf16: float  # operations a second of its matrix units, without sparsity
    fp8: float | None = None  # likewise; None: no units for it


@dataclass(frozen=True)
class DenseModel:
    """A pre-norm decoder with grouped-query attention and gated MLPs. Norms and biases are not counted."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False  # input and output embeddings are one matrix

    @property
    def body(self) -> int:
        """Number of weights in all layers."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn)

    @property
    def head(self) -> int:
        """Number of weights in the output embedding."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        return self.body + self.head * (1 if self.tied else 2)

    @property
    def kv_values(self) -> int:
        """Numbers that the KV cache keeps for a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim


_TABLES = tomllib.loads(Path(__file__).with_name("catalog.toml").read_text(encoding="utf-8"))
DEVICES = {name: Device(**figures) for name, figures in _TABLES["devices"].items()}
MODELS = {name: DenseModel(**sizes) for name, sizes in _TABLES["models"].items()}


def step_seconds(
    model: DenseModel,
    device: Device,
    count: int,
    rows: int,
    context: int = 512,
    *,
    weight_bytes: float = BFLOAT16,
    layer: float = LAYER,
) -> float:
    """Seconds of one forward of `rows` rows on `count` devices; its sequences have `context` tokens together. A weight
    of the layers takes `weight_bytes`, 1 in FP8; output embedding and KV are bfloat16."""
    peak = device.fp8 if weight_bytes <= 1 and device.fp8 else device.bf16
    stored = model.body * weight_bytes + model.head * BFLOAT16  # that are read: no input embedding of its own
    weights = stored / (device.bandwidth * WEIGHTS_SHARE)
    products = 2 * (model.body + model.head) * rows / (peak * PRODUCTS_SHARE)
    kv = context * model.kv_values * BFLOAT16 / (device.bandwidth * KV_SHARE)
    return (weights + products + kv) / count + model.layers * (layer + (2 * ALL_REDUCE if count > 1 else 0.0))


def devices_needed(model: DenseModel, device: Device) -> int:
    """Number of devices that hold the bfloat16 weights."""
    return math.ceil(model.parameters * BFLOAT16 / device.memory)
