"""What engines add to a roofline: seconds that neither bandwidth nor products explain, by engine and hardware. Each
number of `engines.toml` is calibrated on one published row, or assumed, and says so."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from pilotfish.config.hardware.tables import read_table


class Constant(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    value: float
    basis: Literal["calibrated", "assumed"]
    why: str  # the row of `published.toml` that it is calibrated on; why it is assumed


class EngineConstants(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine on some hardware. All in seconds."""

    layer: Constant  # of a layer in any forward: launches, attention, sampling and the host's part, all laid on layers
    all_reduce: Constant  # one of a layer's two, where several devices share it, beside the bytes' own time
    step: Constant  # of the host between two steps without guesses, where `layer` does not hold it
    round: Constant  # of a round of speculation, beside its forwards
    level: Constant  # of the host for each forward of a draft


class Shares(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of peaks that are reached, whatever the engine."""

    weights: Constant  # streaming weights
    kv: Constant  # reading KV
    products: Constant
    link: Constant


class EngineTable(Struct, frozen=True, forbid_unknown_fields=True):
    shares: Shares
    engines: dict[str, EngineConstants]


_TABLE = read_table(__file__, "engines", EngineTable)
SHARES = _TABLE.shares
#: By `engine@hardware`; `any` is hardware that nothing was published of.
ENGINES = _TABLE.engines
PILOTFISH = ENGINES["pilotfish@any"]
