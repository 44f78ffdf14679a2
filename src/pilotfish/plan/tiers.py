"""Models of which a part is in memory beside the devices' own: host memory, SSDs, high-bandwidth flash, 3D DRAM.

What is there is read at that memory's rate, one after the other with what is on the device. That reads are asked for in
time is assumed: no latency is counted.
"""

from __future__ import annotations

import math

from msgspec import Struct
from msgspec.structs import replace

from pilotfish.config.hardware.cost import ForwardLoad, ForwardParts, PlacedModel
from pilotfish.config.hardware.devices import Device
from pilotfish.config.hardware.engines import EngineConstants
from pilotfish.config.hardware.shapes import ModelShape
from pilotfish.config.hardware.tables import Sourced, read_table
from pilotfish.errors import ParameterError


class MemoryTier(Sourced, frozen=True, kw_only=True):
    """Of each device."""

    full_name: str
    memory: float  # bytes
    bandwidth: float  # of reading, bytes a second
    writable: bool = True


TIERS = read_table("tiers", dict[str, MemoryTier])


class TieredModel(Struct, frozen=True, kw_only=True):
    """`weights_share` of the weights and `kv_share` of the KV are in `tier`, evenly of all layers."""

    placed: PlacedModel
    tier: MemoryTier
    weights_share: float = 0.0
    kv_share: float = 0.0

    def __post_init__(self) -> None:
        """ParameterError naming `tier` where it makes no sense."""
        for share in (self.weights_share, self.kv_share):
            if not 0 <= share <= 1:
                raise ParameterError("tier", share, "shares of weights and KV from 0 to 1")
        if self.kv_share and not self.tier.writable:
            raise ParameterError("tier", self.tier.full_name, "memory that can be written, for KV")
        if not self.weights_share and not self.kv_share:
            raise ParameterError("tier", self.tier.full_name, "a share of the weights or of the KV in it")
        if (missing := self._weights_there - self._memory_there) > 0:
            raise ParameterError("tier", self.tier.full_name, f"{missing / 1e9:.1f} GB more, or fewer weights in it")

    @property
    def model(self) -> ModelShape:
        return self.placed.model

    @property
    def engine(self) -> EngineConstants:
        return self.placed.engine

    @property
    def devices(self) -> tuple[tuple[Device, int], ...]:
        return self.placed.devices

    @property
    def kv_bytes(self) -> float:
        return self.placed.kv_bytes

    @property
    def kv_room(self) -> float:
        """Bytes of KV of which each part has room where it is."""
        here = self.placed.kv_room + self._weights_there
        there = self._memory_there - self._weights_there
        return min(_room(here, 1 - self.kv_share), _room(there, self.kv_share))

    def parts(self, load: ForwardLoad) -> ForwardParts:
        own = self.placed.parts(load)
        slower = self.placed.device.bandwidth / self.tier.bandwidth
        weights, kv = (1 + share * (slower - 1) for share in (self.weights_share, self.kv_share))
        return replace(own, weights=own.weights * weights, kv=own.kv * kv)

    def context_products_seconds(self, rows: float, context: float) -> float:
        return self.placed.context_products_seconds(rows, context)

    @property
    def _weights_there(self) -> float:
        return self.weights_share * self.placed.weight_bytes

    @property
    def _memory_there(self) -> float:
        return self.placed.count * self.tier.memory


def _room(room: float, share: float) -> float:
    """Of all KV, where `share` of it has `room`; what cannot even hold the weights holds nothing."""
    if room < 0:
        return room
    return room / share if share else math.inf
