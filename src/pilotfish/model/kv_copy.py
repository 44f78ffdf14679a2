"""KV in and out of slots, as objects: all of a layer's planes, then the next layer's, each token by token.

object   [ layer 0: keys of 64 tokens | values of 64 tokens ][ layer 1: … ]
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pilotfish.core.prefix_keys import OBJECT_TOKENS
from pilotfish.core.segments import KVLayout
from pilotfish.core.slots import Slots
from pilotfish.model.kv_planes import KVPool

Bytes = NDArray[np.uint8]


class HostCopier:
    """Of a pool in this process's memory. numpy leaves other threads the interpreter, and starts none of its own."""

    def __init__(self, kv: KVPool) -> None:
        self._planes = [_as_bytes(plane).numpy() for layer in kv for plane in layer]  # each [slots + 1, bytes]
        self.object_bytes = OBJECT_TOKENS * sum(plane.shape[1] for plane in self._planes)

    def read(self, slots: Slots) -> Bytes:
        """slots [OBJECT_TOKENS] -> [object_bytes]"""
        data = np.empty(self.object_bytes, np.uint8)
        for plane, part in self._parts(data):
            np.take(plane, slots, axis=0, out=part, mode="clip")
        return data

    def write(self, slots: Slots, data: Bytes) -> None:
        """The object's last tokens into so many slots. data [object_bytes]"""
        for plane, part in self._parts(data):
            plane[slots] = part[OBJECT_TOKENS - len(slots) :]

    def _parts(self, data: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
        """Each plane, and its part of an object. [OBJECT_TOKENS, bytes]"""
        first = 0
        for plane in self._planes:
            end = first + OBJECT_TOKENS * plane.shape[1]
            yield plane, data[first:end].reshape(OBJECT_TOKENS, -1)
            first = end


class DeviceCopier:
    """Of a pool on CUDA: over a stream of its own, which is done when a call returns."""

    def __init__(self, kv: KVPool) -> None:
        self._planes = [_as_bytes(plane) for layer in kv for plane in layer]  # each [slots + 1, bytes]
        self._device = self._planes[0].device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self.object_bytes = OBJECT_TOKENS * sum(plane.shape[1] for plane in self._planes)

    @torch.inference_mode()
    def read(self, slots: Slots) -> Bytes:
        """slots [OBJECT_TOKENS] -> [object_bytes]"""
        with torch.cuda.stream(self._stream):
            index = torch.from_numpy(slots).long().to(self._device)
            data = torch.cat([plane[index].flatten() for plane in self._planes]).cpu()
        self._stream.synchronize()
        return np.asarray(data.numpy())

    @torch.inference_mode()
    def write(self, slots: Slots, data: Bytes) -> None:
        """The object's last tokens into so many slots. data [object_bytes]"""
        with torch.cuda.stream(self._stream):
            index, first = torch.from_numpy(slots).long().to(self._device), 0
            whole = torch.from_numpy(data).to(self._device)
            for plane in self._planes:
                part = whole[first : (first := first + OBJECT_TOKENS * plane.shape[1])].view(OBJECT_TOKENS, -1)
                plane[index] = part[OBJECT_TOKENS - len(slots) :]
        self._stream.synchronize()


def copier_of(kv: KVPool) -> HostCopier | DeviceCopier:
    plane = next(iter(kv[0]))
    return DeviceCopier(kv) if plane.device.type == "cuda" else HostCopier(kv)


def layout_of(kv: KVPool) -> KVLayout:
    """How KV of a token of this pool lies in a segment."""
    heads = kv[0].keys.shape[1]
    return KVLayout(len(kv), 0, heads, [plane[0].nbytes // heads for plane in kv[0]])


def _as_bytes(plane: Tensor) -> Tensor:
    """[slots + 1, …] -> [slots + 1, bytes], of the same memory."""
    return plane.view(torch.uint8).view(len(plane), -1)
