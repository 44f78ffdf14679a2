"""Models on devices, as text: `llama-3.1-70b@h200x4`."""

from __future__ import annotations

import re

from pilotfish.config.hardware.cost import KV, PlacedModel, Weights, peak_of
from pilotfish.config.hardware.devices import DEVICES
from pilotfish.config.hardware.engines import PILOTFISH, EngineConstants
from pilotfish.config.hardware.shapes import MODELS
from pilotfish.config.hardware.tables import look_up
from pilotfish.errors import ParameterError

_PEAKS = ("bf16", "fp8", "fp4")
_DEVICES = re.compile(r"(.*?)(?:x([1-9][0-9]{0,3}))?", re.DOTALL)  # matches whatever there is


def place(
    text: str,
    engine: EngineConstants = PILOTFISH,
    weights: Weights = "bf16",
    kv: KV = "bf16",
    *,
    field: str = "pace",
) -> PlacedModel:
    """`model@device` or `model@devicex4`, by the tables. ParameterError naming `field` where a name is not in them, the
    weights do not fit, or the device has no known peak for them."""
    name, _, devices = text.partition("@")
    model = look_up(MODELS, field, "models", name)
    kind, count = parse_devices(devices)
    device = look_up(DEVICES, field, "devices, maybe with x and their number,", kind)
    placed = PlacedModel(model=model, device=device, count=count, engine=engine, weights=weights, kv=kv)
    _check(placed, text, field)
    return placed


def parse_devices(text: str) -> tuple[str, int]:
    """The kind and the number of `h200x4`; 1 where it says none."""
    match = _DEVICES.fullmatch(text)
    assert match is not None
    return match[1], int(match[2] or 1)


def _check(placed: PlacedModel, text: str, field: str) -> None:
    if peak_of(placed.device, placed.weights) is None:
        known = ", ".join(kind for kind in _PEAKS if getattr(placed.device, kind)) or "none"
        raise ParameterError(field, text, f"a device whose peak for {placed.weights} is known; of this one: {known}")
    if placed.missing:
        missing = f"{placed.missing / 1e9:.1f} GB of the weights do not fit"
        raise ParameterError(field, text, f"x{placed.devices_needed} or more: {missing}")
