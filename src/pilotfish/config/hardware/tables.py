import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, TypeVar

from msgspec import Struct, convert

from pilotfish.errors import ParameterError

T = TypeVar("T")
#: Names suggested for an unknown one.
NEAREST = 3


class Sourced(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sources: tuple[str, ...]  # addresses, or repository:path
    unverified: tuple[str, ...] = ()  # fields that no source was found for
    note: str = ""


def read_table(beside: str, name: str, kind: type[T]) -> T:
    """`name`.toml beside the file `beside`. msgspec.ValidationError for missing, unknown or mistyped fields."""
    return convert(tomllib.loads(Path(beside).with_name(f"{name}.toml").read_text(encoding="utf-8")), kind)


def look_up(table: Mapping[str, T], field: str, what: str, name: str) -> T:
    """Ignores case. ParameterError naming `field` and the nearest names."""
    if (found := table.get(name.lower())) is None:
        nearest = get_close_matches(name.lower(), table, NEAREST, cutoff=0.0)
        raise ParameterError(field, name, f"one of the {what} of docs/planning.md; nearest: {', '.join(nearest)}")
    return found


class Device(Sourced, frozen=True, kw_only=True):
    """Peaks are of matrix units, without sparsity; None: absent or unknown."""

    full_name: str
    memory: float  # bytes
    bandwidth: float  # of the memory, bytes a second
    bf16: float | None = None  # operations a second
    fp8: float | None = None
    fp4: float | None = None
    link: str  # to other devices of a node
    link_bandwidth: float | None = None  # bytes a second one way
    power: float | None = None  # watts, the most that its maker designs for
    price: tuple[float, float] | None = None  # USD an hour, lowest and highest offer


class Interconnect(Sourced, frozen=True, kw_only=True):
    bandwidth: float | None = None  # bytes a second one way
    latency: float | None = None  # seconds

    def exchange(self, size: float) -> float:
        """Seconds from a question to the end of its answer, of `size` bytes together. Unpublished parts count as 0."""
        return 2 * (self.latency or 0.0) + (size / self.bandwidth if self.bandwidth else 0.0)


class Constant(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds beside bandwidth and products, or a share of a peak."""

    value: float
    basis: Literal["calibrated", "assumed"]
    why: str  # the row of `published.toml` that it is calibrated on; why it is assumed


class EngineConstants(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds."""

    layer: Constant  # of a layer in any forward: launches, attention, sampling and the host's part, all laid on layers
    all_reduce: Constant  # one of a layer's two, where several devices share it, beside the bytes' own time
    step: Constant  # of the host between two steps without guesses, where `layer` does not hold it
    round: Constant  # of a round of speculation, beside its forwards
    level: Constant  # of the host for each forward of a draft


class Shares(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    weights: Constant  # streaming weights
    kv: Constant  # reading KV
    products: Constant
    link: Constant


class EngineTable(Struct, frozen=True, forbid_unknown_fields=True):
    shares: Shares
    engines: dict[str, EngineConstants]


_ENGINES = read_table(__file__, "engines", EngineTable)
DEVICES = read_table(__file__, "devices", dict[str, Device])
LINKS = read_table(__file__, "links", dict[str, Interconnect])
SHARES = _ENGINES.shares
#: By `engine@hardware`; `any` is hardware that nothing was published of.
ENGINES = _ENGINES.engines
PILOTFISH = ENGINES["pilotfish@any"]
