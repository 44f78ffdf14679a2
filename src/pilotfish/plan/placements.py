"""Models that are not on devices of one kind alone.

A part is in host memory, SSDs, high-bandwidth flash or 3D DRAM. A tier is read at its own rate, in turn with the
device's memory; latency is not counted, as reads are taken to be early enough.

Or attention with KV is on one kind of devices, FFNs and experts on another; hidden states cross twice a layer. Batches
pass the sides in turn, and overlap: a step takes as long as the slower side for all, and no less than one batch alone:

    seconds = max(attention + FFN + exchange, batches · max(attention, FFN))        each of one batch

(MegaScale-Infer, arXiv 2504.02263, for many layers). A side has half of a layer's fixed time and of its all-reduces."""

import math
from collections.abc import Sequence

from msgspec.structs import replace

from pilotfish.config.hardware.cost import BYTES, KV_MEMORY, ForwardLoad, ForwardParts, PlacedModel
from pilotfish.config.hardware.tables import SHARES, Device, Interconnect, Sourced, read_table
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


class SplitModel(PlacedModel, frozen=True, kw_only=True):
    """Attention's side, with the output embedding; `ffn` is the same model in the same engine."""

    ffn: PlacedModel
    link: Interconnect
    batches: int = 1

    def __post_init__(self) -> None:
        if self.link.bandwidth is None:
            raise ParameterError("split", "its link", "a link whose bandwidth is known")
        if self.batches < 1:
            raise ParameterError("split", self.batches, "1 batch or more")
        memory = self.ffn.count * self.ffn.device.memory * KV_MEMORY
        if (missing := self._ffn_bytes - memory) > 0:
            raise ParameterError("split", self.ffn.count, f"more devices: {missing / 1e9:.1f} GB of FFNs do not fit")

    @property
    def devices(self) -> tuple[tuple[Device, int], ...]:
        return (*super().devices, *self.ffn.devices)

    @property
    def kv_room(self) -> float:
        return super().kv_room + self._ffn_bytes

    def parts(self, load: ForwardLoad) -> ForwardParts:
        """Of the slower: one batch through both sides, or all through the slower side."""
        share = replace(load, rows=-(-load.rows // self.batches), sequences=-(-load.sequences // self.batches))
        attention, ffn = self._attention_parts(share), self._ffn_parts(share)
        exchange = self.model.layers * self.link.exchange(2 * share.rows * self.model.hidden * BYTES["bf16"])
        slower = max(attention, ffn, key=lambda side: side.seconds)
        if self.batches * slower.seconds > attention.seconds + ffn.seconds + exchange:
            return _total([slower] * self.batches)
        return replace(_total([attention, ffn]), exchange=exchange)

    def _attention_parts(self, load: ForwardLoad) -> ForwardParts:
        whole, model = super().parts(load), self.model
        stored = model.attention * BYTES[self.weights] + model.head * BYTES["bf16"]
        return _side(self, whole, stored, model.attention + model.head)

    def _ffn_parts(self, load: ForwardLoad) -> ForwardParts:
        whole, model = self.ffn.parts(load), self.model
        stored = (model.read(load.rows) - model.attention) * BYTES[self.ffn.weights]
        return replace(_side(self.ffn, whole, stored, model.multiplied - model.attention - model.head), kv=0.0)

    @property
    def _ffn_bytes(self) -> float:
        return (self.model.parameters - self.model.embeddings - self.model.attention) * BYTES[self.ffn.weights]


def _side(side: PlacedModel, whole: ForwardParts, stored: float, multiplied: float) -> ForwardParts:
    return replace(
        whole,
        weights=stored / (side.count * side.device.bandwidth * SHARES.weights.value),
        products=whole.products * multiplied / side.model.multiplied,
        all_reduces=whole.all_reduces / 2,
        layers=whole.layers / 2,
    )


def _total(sides: Sequence[ForwardParts]) -> ForwardParts:
    names = ForwardParts.__struct_fields__
    return ForwardParts(**{name: sum(getattr(side, name) for side in sides) for name in names})
