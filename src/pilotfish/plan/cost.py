"""The time of a forward on a device: a roofline of weights, products and KV, and a fixed cost a layer.

    seconds =   weight bytes / (bandwidth * 0.85)  +  2 * weights * rows / (peak * 0.6)
              + KV bytes / (bandwidth * 0.6)  +  layers * (layer + 2 all-reduces)

with bandwidth and peak of all devices together, among which tensor parallelism splits weights and KV. Reading weights
and multiplying are added, not overlapped: against published speed-ups by batch size (EAGLE-3 on one H100, batch 4 to
64) the sum is off by 8 % in the mean, the larger of the two by 25 %. The efficiencies are assumed, the fixed costs
fitted to one published rate each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pilotfish.plan.catalog import DenseModel, Device

#: Shares of the peak that are reached: streaming weights, reading KV, multiplying.
WEIGHTS_SHARE, KV_SHARE, PRODUCTS_SHARE = 0.85, 0.6, 0.6
BFLOAT16 = 2.0  # bytes


@dataclass(frozen=True)
class Overheads:
    """Seconds of a serving system beside the roofline."""

    layer: float  # launches, attention, sampling and the host's part, all laid on layers
    all_reduce: float  # one of a layer's two, where several devices share it


#: Fitted to Llama-3.1 70B on one and 405B on four H200 in FP8, batch 1: 51.14 and 33.46 tokens/s (NVIDIA, 2024).
TENSORRT_LLM = Overheads(layer=28e-6, all_reduce=6e-6)


def step_seconds(
    model: DenseModel,
    device: Device,
    count: int,
    rows: int,
    context: int = 512,
    *,
    sequences: int = 1,
    weight_bytes: float = BFLOAT16,
    overheads: Overheads = TENSORRT_LLM,
) -> float:
    """Seconds of one forward of `rows` rows on `count` devices. Each of `sequences` sequences has `context` tokens. A
    weight of the layers takes `weight_bytes`, 1 in FP8; output embedding and KV are bfloat16."""
    peak = device.fp8 if weight_bytes <= 1 and device.fp8 else device.bf16
    weights = stored_bytes(model, weight_bytes) / (device.bandwidth * WEIGHTS_SHARE)
    products = 2 * (model.body + model.head) * rows / (peak * PRODUCTS_SHARE)
    kv = sequences * context * model.kv_values * BFLOAT16 / (device.bandwidth * KV_SHARE)
    layer = overheads.layer + (2 * overheads.all_reduce if count > 1 else 0.0)
    return (weights + products + kv) / count + model.layers * layer


def stored_bytes(model: DenseModel, weight_bytes: float = BFLOAT16) -> float:
    """Bytes of the weights that a forward reads: all but an input embedding of its own."""
    return model.body * weight_bytes + model.head * BFLOAT16


def devices_needed(model: DenseModel, device: Device) -> int:
    """Number of devices that hold the bfloat16 weights."""
    return math.ceil(model.parameters * BFLOAT16 / device.memory)
