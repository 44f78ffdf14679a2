from collections.abc import Iterable
from statistics import fmean

from msgspec import Struct

from pilotfish.errors import ParameterError


class RequestKind(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: int  # tokens
    output: int  # tokens
    share: float = 1.0  # of all requests, beside other kinds' shares


class Demand(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Either `rate` requests a second at random times, or users with one request each at all times."""

    requests: tuple[RequestKind, ...]
    shared: float = 0.0  # of each prompt's tokens, the share that the prefix cache has
    rate: float | None = None  # requests a second
    users: int | None = None

    def __post_init__(self) -> None:
        if not self.requests:
            raise ParameterError("requests", self.requests, "one kind of requests or more")
        for kind in self.requests:
            if kind.prompt < 1 or kind.output < 1 or not kind.share > 0:
                allowed = "a prompt and an output of a token or more, shares above 0"
                raise ParameterError("requests", kind.prompt, allowed)
        if not 0 <= self.shared < 1:
            raise ParameterError("shared", self.shared, "a share of the prompt from 0 to below 1")
        if (self.rate is None) == (self.users is None):
            raise ParameterError("rate", self.rate, "either a rate or users")
        if not (self.rate or self.users or 0) > 0:
            raise ParameterError("rate" if self.users is None else "users", self.rate or self.users, "a number above 0")

    def mean(self, values: Iterable[float]) -> float:
        """Over the requests, of a value for each kind."""
        return fmean(values, [kind.share for kind in self.requests])

    @property
    def output(self) -> float:
        return self.mean(kind.output for kind in self.requests)

    @property
    def prompt(self) -> float:
        return self.mean(kind.prompt for kind in self.requests)

    @property
    def context(self) -> float:
        """Mean tokens before a decoding sequence's rows, over steps and sequences; also the KV that it keeps."""
        return self.mean(kind.output * (kind.prompt + kind.output / 2) for kind in self.requests) / self.output

    @property
    def longest(self) -> int:
        return max(kind.prompt + kind.output for kind in self.requests)


class LoadLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """On means of all requests, not percentiles."""

    tpot: float | None = None  # seconds between a user's tokens
    ttft: float | None = None  # seconds to the first one
    dollars_per_hour: float | None = None  # at the mean of a device's lowest and highest price

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ParameterError(name, value, "a number above 0")
