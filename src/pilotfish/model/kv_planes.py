"""Keys and values may be rounded to elements of 8 bits: each head of a token by itself, to nearest with ties to even,
with one scale. `kernels/attention.h` rounds and reads in the same way."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pilotfish.config.fields import KVDType
from pilotfish.core.cache.slots import Slots
from pilotfish.core.features.features import Features
from pilotfish.errors import ParameterError
from pilotfish.model.loading.configuration import has_latents, kept_heads, key_size

#: Of the elements of 8 bits: what the largest magnitude of a head becomes.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
#: The first with FP8 matrix units, and conversions of e4m3 for Triton: Ada and Hopper.
FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class LayerKV:
    """Keys and values of a layer, a token a slot; the last slot is scratch for padding rows. All contiguous."""

    keys: Tensor  # [slots + 1, kv_heads, head_dim]
    values: Tensor  # likewise, or the keys themselves: of latents, which values are the first part of
    key_scales: Tensor | None = None  # float32 [slots + 1, kv_heads], of elements of 8 bits only
    value_scales: Tensor | None = None

    def __iter__(self) -> Iterator[Tensor]:
        own = (self.values, self.value_scales) if self.values is not self.keys else (None, None)
        planes = (self.keys, own[0], self.key_scales, own[1])
        return (plane for plane in planes if plane is not None)

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """k and v [rows, kv_heads, head_dim], slots int64 [rows]."""
        if self.key_scales is None or self.value_scales is None:
            self.keys[slots], self.values[slots] = k, v
            return
        for plane, scales, x in ((self.keys, self.key_scales, k), (self.values, self.value_scales, v)):
            elements, scales[slots] = rounded(x, plane.dtype)
            bits(plane)[slots] = bits(elements)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of slots [...], float64 [..., kv_heads, head_dim] each."""
        if self.key_scales is None or self.value_scales is None:
            return self.keys[slots].double(), self.values[slots].double()
        keys, values = (bits(plane)[slots].view(plane.dtype).double() for plane in (self.keys, self.values))
        return keys * self.key_scales[slots][..., None], values * self.value_scales[slots][..., None]


@dataclass(frozen=True)
class FeatureKV:
    """Features of tokens, one a slot. The last plane of a pool that has them; kernels never see it."""

    features: Tensor  # [slots + 1, width], contiguous

    def __iter__(self) -> Iterator[Tensor]:
        yield self.features

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """rows [rows, width], slots int32 [rows]."""
        if self.features.device.type == "cpu":
            _elements(self.features)[slots.numpy()] = _elements(rows)
        else:
            self.features[slots.long()] = rows

    def read(self, slots: Slots) -> Features:
        if self.features.device.type != "cpu":
            rows: Features = self.features[torch.from_numpy(slots).to(self.features.device)].cpu().float().numpy()
            return rows
        elements = _elements(self.features)[slots]
        if elements.dtype == np.float32:
            return elements
        return (elements.astype(np.uint32) << 16).view(np.float32)  # bfloat16 is the first half of float32


def _elements(plane: Tensor) -> NDArray[Any]:
    return plane.numpy() if plane.dtype == torch.float32 else plane.view(torch.uint16).numpy()


#: KV of all layers, as kernels get it.
KVPool = Sequence[LayerKV]
#: All that is kept of tokens in their slots.
SlotPlanes = Sequence[LayerKV | FeatureKV]


def bits(elements: Tensor) -> Tensor:
    return elements.view(torch.uint8)


def rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Heads [..., head_dim] as elements of `dtype`, and scales, float32 [...]; zeros and NaN if one is not finite."""
    x, most = x.float(), LARGEST[dtype]
    largest = x.abs().amax(dim=-1)
    quotient = largest / torch.full_like(largest, most)  # by a number it could be a product with its reciprocal
    scales = torch.where(largest.isfinite(), quotient, torch.nan)
    steps = (x / scales[..., None]).nan_to_num(nan=0.0).clamp(-most, most)
    return (steps.round() if dtype == torch.int8 else steps).to(dtype), scales


def element_type(asked: KVDType, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type of keys and values of a model in `dtype`. ParameterError if the device cannot read it."""
    if asked == "auto":
        return dtype
    if asked == "int8":
        return torch.int8
    refuse_without_fp8("kv_dtype", device, "auto or int8")
    return torch.float8_e4m3fn


def refuse_without_fp8(field: str, device: torch.device, others: str) -> None:
    if device.type != "cuda" or torch.cuda.get_device_capability(str(device)) < FP8_CAPABILITY:
        needed = ".".join(map(str, FP8_CAPABILITY))
        raise ParameterError(field, "fp8", f"{others} here; fp8 needs CUDA of capability {needed}")


def empty_kv(config: Any, dtype: torch.dtype, num_slots: int, device: torch.device) -> list[LayerKV]:
    """`config` is as `load_config` gives it."""
    heads = (num_slots + 1, kept_heads(config))
    plane = partial(zeros, (*heads, key_size(config)), dtype, device)
    scales = partial(zeros, heads, torch.float32, device)
    makers = (plane, scales) if dtype in LARGEST else (plane,)

    def pair(make: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        keys = make()
        return keys, keys if has_latents(config) else make()

    return [LayerKV(*chain.from_iterable(map(pair, makers))) for _ in range(config.num_hidden_layers)]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU from numpy, whose zeros take no memory until they are written; torch writes them."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
