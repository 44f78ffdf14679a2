"""Attention with KV on devices of one kind, FFNs and experts on those of another; hidden states cross twice a layer.

One batch passes the two sides in turn. With several a side works on one while the other has another, so that a step of
all takes as long as the slower side for all of them, and no less than one batch alone:

    seconds = max(attention + FFN + exchange, batches · max(attention, FFN))        each of one batch

as MegaScale-Infer (arXiv 2504.02263) has it in the limit of many layers. A layer's fixed time is taken to be half of
each side's; each side has one of its two all-reduces.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from pilotfish.config.hardware.cost import BYTES, KV_MEMORY, ForwardLoad, ForwardParts, PlacedModel
from pilotfish.config.hardware.devices import Device, Interconnect
from pilotfish.config.hardware.engines import SHARES, EngineConstants
from pilotfish.config.hardware.shapes import ModelShape
from pilotfish.errors import ParameterError


class SplitModel(Struct, frozen=True, kw_only=True):
    """Both sides are placements of the same model, in the same engine; the output embedding is on attention's side."""

    attention: PlacedModel
    ffn: PlacedModel
    link: Interconnect
    batches: int = 1

    def __post_init__(self) -> None:
        """ParameterError naming `split` where it makes no sense."""
        if self.link.bandwidth is None:
            raise ParameterError("split", "its link", "a link whose bandwidth is known")
        if self.attention.model is not self.ffn.model:
            raise ParameterError("split", "two models", "the attention and the FFNs of one model")
        if self.batches < 1:
            raise ParameterError("split", self.batches, "1 batch or more")
        memory = self.ffn.count * self.ffn.device.memory * KV_MEMORY
        if (missing := self._ffn_bytes - memory) > 0:
            raise ParameterError("split", self.ffn.count, f"more devices: {missing / 1e9:.1f} GB of FFNs do not fit")

    @property
    def model(self) -> ModelShape:
        return self.attention.model

    @property
    def engine(self) -> EngineConstants:
        return self.attention.engine

    @property
    def devices(self) -> tuple[tuple[Device, int], ...]:
        return (*self.attention.devices, *self.ffn.devices)

    @property
    def kv_bytes(self) -> float:
        return self.attention.kv_bytes

    @property
    def kv_room(self) -> float:
        return self.attention.kv_room + self._ffn_bytes

    def parts(self, load: ForwardLoad) -> ForwardParts:
        """Of the way that takes longest: one batch through both sides, or all through the slower one."""
        share = replace(load, rows=-(-load.rows // self.batches), sequences=-(-load.sequences // self.batches))
        attention, ffn, exchange = self._attention(share), self._ffn(share), self._exchange(share.rows)
        slower = max(attention, ffn, key=lambda side: side.seconds)
        if self.batches * slower.seconds > attention.seconds + ffn.seconds + exchange:
            return _total([slower] * self.batches)
        return replace(_total([attention, ffn]), exchange=exchange)

    def context_products_seconds(self, rows: float, context: float) -> float:
        return self.attention.context_products_seconds(rows, context)

    def _attention(self, load: ForwardLoad) -> ForwardParts:
        side, model = self.attention, self.model
        stored = model.attention * BYTES[side.weights] + model.head * BYTES["bf16"]
        return _side(side, load, stored, model.attention + model.head, side.parts(load).kv)

    def _ffn(self, load: ForwardLoad) -> ForwardParts:
        side, model = self.ffn, self.model
        stored = (model.read(load.rows) - model.attention) * BYTES[side.weights]
        return _side(side, load, stored, model.multiplied - model.attention - model.head, 0.0)

    def _exchange(self, rows: int) -> float:
        return self.model.layers * self.link.exchange(2 * rows * self.model.hidden * BYTES["bf16"])

    @property
    def _ffn_bytes(self) -> float:
        """Of the weights that are not attention's nor embeddings."""
        embeddings = self.model.head * (1 if self.model.tied else 2)
        return (self.model.parameters - embeddings - self.model.attention) * BYTES[self.ffn.weights]


def _side(side: PlacedModel, load: ForwardLoad, stored: float, multiplied: float, kv: float) -> ForwardParts:
    whole = side.parts(load)
    return ForwardParts(
        weights=stored / (side.count * side.device.bandwidth * SHARES.weights.value),
        products=whole.products * multiplied / side.model.multiplied,
        kv=kv,
        all_reduces=whole.all_reduces / 2,
        layers=whole.layers / 2,
    )


def _total(sides: Sequence[ForwardParts]) -> ForwardParts:
    names = ForwardParts.__struct_fields__
    return ForwardParts(**{name: sum(getattr(side, name) for side in sides) for name in names})
