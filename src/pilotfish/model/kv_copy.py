"""KV in and out of slots, as objects and segments: all of a layer's planes, then the next layer's, each token by token.

object   [ layer 0: keys of 64 tokens | values of 64 tokens ][ layer 1: … ]       of all layers
segment  [ layer 8: keys of n tokens | values of n tokens ][ layer 9: … ]         of some (`KVLayout`)

`KVLayout` is in core/prefilling/segments.py. Features are one more layer, the last.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS
from pilotfish.core.cache.slots import Slots
from pilotfish.core.prefilling.segments import KVLayout
from pilotfish.model.kv_planes import FeatureKV, LayerKV, SlotPlanes

Bytes = NDArray[np.uint8]


class KVCopier(ABC):
    def __init__(self, kv: SlotPlanes) -> None:
        self._layers = [[plane.view(torch.uint8).view(len(plane), -1) for plane in layer] for layer in kv]
        self.object_bytes = OBJECT_TOKENS * sum(plane.shape[1] for plane in chain(*self._layers))

    def read(self, slots: Slots) -> Bytes:
        """slots [OBJECT_TOKENS] -> [object_bytes]"""
        data = np.empty(self.object_bytes, np.uint8)
        self.read_layers(slots, range(len(self._layers)), data)
        return data

    def write(self, slots: Slots, data: Bytes) -> None:
        """The object's last len(slots) tokens into the slots. data [object_bytes]"""
        self._write(slots, range(len(self._layers)), OBJECT_TOKENS, data)

    @abstractmethod
    def read_layers(self, slots: Slots, layers: range, out: Bytes) -> None:
        """KV of slots [tokens] in these layers, as a segment. out [segment's bytes]"""

    def write_layers(self, slots: Slots, layers: range, data: Bytes) -> None:
        """A segment of these layers into slots [tokens]. data [segment's bytes]"""
        self._write(slots, layers, len(slots), data)

    @abstractmethod
    def _write(self, slots: Slots, layers: range, tokens: int, data: Bytes) -> None:
        """The last len(slots) of the `tokens` in `data` into the slots."""


class HostCopier(KVCopier):
    """numpy releases the GIL and starts no threads of its own."""

    def __init__(self, kv: SlotPlanes) -> None:
        super().__init__(kv)
        self._arrays = [[plane.numpy() for plane in layer] for layer in self._layers]

    def read_layers(self, slots: Slots, layers: range, out: Bytes) -> None:
        for plane, part in self._parts(layers, len(slots), out):
            np.take(plane, slots, axis=0, out=part, mode="clip")

    def _write(self, slots: Slots, layers: range, tokens: int, data: Bytes) -> None:
        for plane, part in self._parts(layers, tokens, data):
            plane[slots] = part[tokens - len(slots) :]

    def _parts(self, layers: range, tokens: int, data: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
        """Each plane of these layers, and its part of `data`, [tokens, bytes]."""
        first = 0
        for plane in chain.from_iterable(self._arrays[layer] for layer in layers):
            end = first + tokens * plane.shape[1]
            yield plane, data[first:end].reshape(tokens, -1)
            first = end


class DeviceCopier(KVCopier):
    """A stream of its own, synchronized when a call returns."""

    def __init__(self, kv: SlotPlanes) -> None:
        super().__init__(kv)
        self._device = self._layers[0][0].device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def read_layers(self, slots: Slots, layers: range, out: Bytes) -> None:
        with torch.cuda.stream(self._stream):
            index = torch.from_numpy(slots).long().to(self._device)
            whole = torch.cat([plane[index].flatten() for layer in layers for plane in self._layers[layer]])
            torch.from_numpy(out).copy_(whole)
        self._stream.synchronize()

    @torch.inference_mode()
    def _write(self, slots: Slots, layers: range, tokens: int, data: Bytes) -> None:
        with torch.cuda.stream(self._stream):
            index, first = torch.from_numpy(slots).long().to(self._device), 0
            whole = torch.from_numpy(data).to(self._device)
            for plane in chain.from_iterable(self._layers[layer] for layer in layers):
                part = whole[first : (first := first + tokens * plane.shape[1])].view(tokens, -1)
                plane[index] = part[tokens - len(slots) :]
        self._stream.synchronize()


def copier_of(kv: SlotPlanes) -> KVCopier:
    plane = next(iter(kv[0]))
    return DeviceCopier(kv) if plane.device.type == "cuda" else HostCopier(kv)


def layout_of(kv: SlotPlanes) -> KVLayout:
    first, last = kv[0], kv[-1]
    assert isinstance(first, LayerKV)
    heads, features = first.keys.shape[1], last.features[0].nbytes if isinstance(last, FeatureKV) else 0
    return KVLayout(len(kv), 0, heads, [plane[0].nbytes // heads for plane in first], features)
