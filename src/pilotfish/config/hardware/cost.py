"""The time of a forward: a roofline of weights, products and KV, and the engine's time for each layer.

    seconds = (weight bytes / bandwidth + 2 · weights · rows / peak) / devices + KV bytes / bandwidth / devices with KV
              + layers · (layer + 2 all-reduces)

Bandwidths and peaks are multiplied by the share reached. The times to read weights and to multiply add up: published
speed-ups by batch size ask for the sum (docs/planning.md)."""

import math
import re
from typing import Literal

from msgspec import Struct

from pilotfish.config.hardware.shapes import MODELS, ModelShape
from pilotfish.config.hardware.tables import DEVICES, PILOTFISH, SHARES, Device, EngineConstants, look_up
from pilotfish.errors import ParameterError

Weights = Literal["bf16", "fp8", "int4"]
KV = Literal["bf16", "fp8"]
#: Bytes of a number. int4: 32 bits of scale and zero for each 128 weights, as AWQ's groups have.
BYTES: dict[str, float] = {"bf16": 2.0, "fp8": 1.0, "int4": 4.25 / 8}

#: Of a device's memory, what weights and KV can have together.
KV_MEMORY = 0.9
_PEAKS = ("bf16", "fp8", "fp4")
_DEVICES = re.compile(r"(.*?)(?:x([1-9][0-9]{0,3}))?", re.DOTALL)  # matches whatever there is


class ForwardLoad(Struct, frozen=True, kw_only=True):
    rows: int  # of all sequences
    sequences: int = 1
    context: float = 0.0  # tokens before a sequence's rows


class ForwardParts(Struct, frozen=True, kw_only=True):
    weights: float  # read from memory
    products: float
    kv: float  # read from memory
    all_reduces: float
    layers: float  # what the engine adds, without all-reduces
    exchange: float = 0.0  # of hidden states between attention and FFNs that are apart

    @property
    def seconds(self) -> float:
        return self.weights + self.products + self.kv + self.all_reduces + self.layers + self.exchange


class PlacedModel(Struct, frozen=True, kw_only=True):
    model: ModelShape
    device: Device
    count: int = 1
    engine: EngineConstants = PILOTFISH
    weights: Weights = "bf16"  # of the layers; the output embedding has 16 bits in any case
    kv: KV = "bf16"

    def seconds(self, load: ForwardLoad) -> float:
        return self.parts(load).seconds

    def parts(self, load: ForwardLoad) -> ForwardParts:
        stored = self.model.read(load.rows) * BYTES[self.weights] + self.model.head * BYTES["bf16"]
        peak = peak_of(self.device, self.weights)
        assert peak is not None  # `place` refuses such a device
        return ForwardParts(
            weights=stored / (self.count * self.device.bandwidth * SHARES.weights.value),
            products=2 * self.model.multiplied * load.rows / (self.count * peak * SHARES.products.value),
            kv=load.sequences * self.context_seconds(load.context),
            all_reduces=self.model.layers * 2 * self.all_reduce(load.rows) if self.count > 1 else 0.0,
            layers=self.model.layers * self.engine.layer.value,
        )

    def context_seconds(self, context: float) -> float:
        """Seconds to read the KV of a sequence once. Devices beyond the number of KV heads read copies."""
        split = min(self.count, self.model.kv_heads)
        return self.model.kv_read(context) * BYTES[self.kv] / (self.device.bandwidth * SHARES.kv.value) / split

    def context_products_seconds(self, rows: float, context: float) -> float:
        """Seconds for the 16-bit queries of `rows` rows; a forward of few rows hides them behind reading KV."""
        peak = peak_of(self.device, "bf16") or peak_of(self.device, self.weights)
        assert peak is not None
        return 2 * self.model.context_products(context) * rows / (self.count * peak * SHARES.products.value)

    def all_reduce(self, rows: int) -> float:
        """Seconds of one all-reduce of `rows` hidden states: a ring passes 2 (n - 1) / n of their bytes."""
        passed = 2 * (self.count - 1) / self.count * rows * self.model.hidden * BYTES["bf16"]
        bandwidth = (self.device.link_bandwidth or math.inf) * SHARES.link.value
        return self.engine.all_reduce.value + passed / bandwidth

    @property
    def devices(self) -> tuple[tuple[Device, int], ...]:
        return ((self.device, self.count),)

    @property
    def weight_bytes(self) -> float:
        """On all devices together."""
        embeddings = self.model.embeddings
        return (self.model.parameters - embeddings) * BYTES[self.weights] + embeddings * BYTES["bf16"]

    @property
    def kv_bytes(self) -> float:
        copies = max(1.0, self.count / self.model.kv_heads)
        return copies * self.model.kv_values * BYTES[self.kv]

    @property
    def kv_room(self) -> float:
        """Bytes left for KV on all devices together; below 0 where the weights do not fit."""
        return self.count * self.device.memory * KV_MEMORY - self.weight_bytes


def peak_of(device: Device, weights: Weights) -> float | None:
    """Operations a second. FP8 is widened on devices without FP8 units, int4 on all. None: not known."""
    return (device.fp8 or device.bf16) if weights == "fp8" else device.bf16


def place(
    text: str, engine: EngineConstants = PILOTFISH, weights: Weights = "bf16", kv: KV = "bf16", *, field: str = "pace"
) -> PlacedModel:
    """`model@device` or `model@devicex4`. ParameterError for unknown names, too large weights, or an unknown peak."""
    name, _, devices = text.partition("@")
    model = look_up(MODELS, field, "models", name)
    kind, count = parse_devices(devices)
    device = look_up(DEVICES, field, "devices, maybe with x and their number,", kind)
    placed = PlacedModel(model=model, device=device, count=count, engine=engine, weights=weights, kv=kv)
    _check(placed, text, field)
    return placed


def parse_devices(text: str) -> tuple[str, int]:
    match = _DEVICES.fullmatch(text)
    assert match is not None
    return match[1], int(match[2] or 1)


def _check(placed: PlacedModel, text: str, field: str) -> None:
    if peak_of(placed.device, placed.weights) is None:
        known = ", ".join(kind for kind in _PEAKS if getattr(placed.device, kind)) or "none"
        raise ParameterError(field, text, f"a device whose peak for {placed.weights} is known; of this one: {known}")
    memory = placed.device.memory
    if (missing := placed.weight_bytes - placed.count * memory) > 0:
        enough = f"x{math.ceil(placed.weight_bytes / memory)} or more"
        raise ParameterError(field, text, f"{enough}: {missing / 1e9:.1f} GB of the weights do not fit")
