from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta, Struct, ValidationError, convert
from msgspec.structs import replace

from pilotfish.config.hardware.cost import KV, Weights
from pilotfish.config.hardware.shapes import MODELS, ModelShape
from pilotfish.config.hardware.tables import DEVICES, ENGINES, LINKS, Device, EngineConstants, Interconnect, look_up
from pilotfish.errors import InputError, ParameterError
from pilotfish.plan.planner.acceptance import GuessedTree, PairAcceptance, published_acceptance
from pilotfish.plan.planner.demand import Demand, LoadLimits

Count = Annotated[int, Meta(ge=1, le=1024)]


class OfferedDevice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    count: Count = 1
    price: tuple[float, float] | None = None  # USD an hour, lowest and highest; None: that of devices.toml

    def device(self) -> Device:
        found = look_up(DEVICES, "devices", "devices", self.name)
        if self.price is None:
            return found
        if not 0 < self.price[0] <= self.price[1]:
            raise ParameterError("price", self.price, "USD an hour above 0, the lowest first")
        return replace(found, price=self.price)


class OfferedDraft(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Without `rate` and `trees` its acceptance is that of drafts.toml."""

    model: str
    rate: float | None = None
    trees: tuple[GuessedTree, ...] = ()
    source: str = ""  # of these
    weights: Weights | None = None  # None: as the target's

    def acceptance(self, target: str) -> PairAcceptance:
        if self.rate is None and not self.trees:
            return published_acceptance(target, self.model)
        source = self.source or "given without a source"
        return PairAcceptance(rate=self.rate, trees=self.trees, why=source, sources=(source,))


class PlannedTier(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    weights: float = 0.0
    kv: float = 0.0
    memory: float | None = None  # bytes of each device
    bandwidth: float | None = None  # bytes a second
    writable: bool = True


class OfferedPlacement(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A place of the target, as `h200x2`. With `ffn_on` the FFNs are there, and the rest `on` the first."""

    on: str
    tier: PlannedTier | None = None
    ffn_on: str | None = None
    ffn_link: str = "nvlink4"
    batches: int = 1


class Situation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    target: str
    devices: tuple[OfferedDevice, ...]
    workload: Demand
    about: str = ""
    weights: Weights = "bf16"
    kv: KV = "bf16"
    engine: str = "pilotfish@any"
    drafts: tuple[OfferedDraft, ...] = ()
    placements: tuple[OfferedPlacement, ...] = ()  # none: all powers of two of devices of a kind that hold the target
    limits: LoadLimits = LoadLimits()
    link: str = "roce-100g"  # between devices that do not share a model
    objective: Literal["cost", "speed"] = "cost"  # least money a token, or most tokens a second of a user

    def __post_init__(self) -> None:
        names = [offer.name.lower() for offer in self.devices]
        if not names or len(set(names)) < len(names):
            raise ParameterError("devices", names, "one device or more, each named once")
        self.model, self.constants, self.network  # noqa: B018  # all are looked up
        for draft in self.drafts:
            look_up(MODELS, "draft", "models", draft.model)
            draft.acceptance(self.target)
        for offer in self.devices:
            offer.device()

    @property
    def model(self) -> ModelShape:
        return look_up(MODELS, "target", "models", self.target)

    @property
    def constants(self) -> EngineConstants:
        return look_up(ENGINES, "engine", "engines", self.engine)

    @property
    def network(self) -> Interconnect:
        return look_up(LINKS, "link", "links", self.link)

    @property
    def counts(self) -> Mapping[str, int]:
        return {offer.device().full_name: offer.count for offer in self.devices}


def situation_of(record: object, place: str) -> Situation:
    """InputError names `place` and the field."""
    try:
        return convert(record, Situation)
    except ValidationError as error:
        raise InputError(f"plan: {place}: {error}") from error
