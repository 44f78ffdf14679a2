"""A part of a model is in host memory, SSDs, high-bandwidth flash or 3D DRAM. A tier is read at its own rate, in turn
with the device's memory; latency is not counted, as reads are taken to be early enough."""

import math

from msgspec.structs import replace

from pilotfish.config.hardware.cost import ForwardLoad, ForwardParts, PlacedModel
from pilotfish.config.hardware.tables import Sourced, read_table
from pilotfish.errors import ParameterError


class MemoryTier(Sourced, frozen=True, kw_only=True):
    full_name: str
    memory: float  # bytes
    bandwidth: float  # of reading, bytes a second
    writable: bool = True


TIERS = read_table(__file__, "tiers", dict[str, MemoryTier])


class TieredModel(PlacedModel, frozen=True, kw_only=True):
    """`weights_share` of the weights and `kv_share` of the KV of all layers are in `tier`."""

    tier: MemoryTier
    weights_share: float = 0.0
    kv_share: float = 0.0

    def __post_init__(self) -> None:
        for share in (self.weights_share, self.kv_share):
            if not 0 <= share <= 1:
                raise ParameterError("tier", share, "shares of weights and KV from 0 to 1")
        if self.kv_share and not self.tier.writable:
            raise ParameterError("tier", self.tier.full_name, "memory that can be written, for KV")
        if not self.weights_share and not self.kv_share:
            raise ParameterError("tier", self.tier.full_name, "a share of the weights or of the KV in it")
        if self._tier_room < 0:
            missing = f"{-self._tier_room / 1e9:.1f} GB more, or fewer weights in it"
            raise ParameterError("tier", self.tier.full_name, missing)

    @property
    def kv_room(self) -> float:
        """Bytes of KV that fit, each part where it is; below 0 where the weights do not fit."""
        device_room = super().kv_room + self.weights_share * self.weight_bytes
        rooms = ((device_room, 1 - self.kv_share), (self._tier_room, self.kv_share))
        return min(room if room < 0 else room / share if share else math.inf for room, share in rooms)

    def parts(self, load: ForwardLoad) -> ForwardParts:
        own = super().parts(load)
        slower = self.device.bandwidth / self.tier.bandwidth
        weights, kv = (1 + share * (slower - 1) for share in (self.weights_share, self.kv_share))
        return replace(own, weights=own.weights * weights, kv=own.kv * kv)

    @property
    def _tier_room(self) -> float:
        return self.count * self.tier.memory - self.weights_share * self.weight_bytes
