"""What a page is drawn from: the parts of a bench's JSON that it needs. Times are seconds from a round's beginning."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
from msgspec import Struct

from pilotfish.errors import ParameterError

OFF = "off"


class UnderLoad(Struct, frozen=True, kw_only=True):
    """Of a setting under one load: so many at a time, or so many a second."""

    setting: str
    concurrency: int | None = None
    rate: float | None = None

    @property
    def load(self) -> float:
        return self.concurrency or self.rate or 0


class MeasuredSetting(UnderLoad, frozen=True, kw_only=True):
    """Spreads are those of `bench.report.Spread`."""

    tokens_per_second: dict[str, float] | float
    over_off: dict[str, float] | None = None
    tokens_per_verify_step: float | None = None
    nodes: float | None = None
    hit_share: float | None = None
    equal_outputs: float | None = None
    overruns: float = 0.0

    @property
    def speed(self) -> float:
        found = self.tokens_per_second
        return found["median"] if isinstance(found, dict) else found


class RequestTimes(UnderLoad, frozen=True, kw_only=True):
    """A request. One that failed has an `error`, and maybe no tokens."""

    round: int = 0
    category: str = ""
    sent: float
    first: float | None
    ended: float
    times: list[float]  # [tokens]; those that came together have one time
    error: str | None = None

    @property
    def gaps(self) -> list[float]:
        """Between the moments at which tokens came."""
        return [later - sooner for sooner, later in pairwise(self.times) if later > sooner]


class DepthCounts(Struct, frozen=True):
    """Of trees: how many reached a depth, and how many had a guess accepted there. Depth d is at index d - 1."""

    offered: list[int]
    accepted: list[int]


class MeasuredAcceptance(UnderLoad, frozen=True, kw_only=True):
    by_depth: DepthCounts | None = None


class Made(Struct, frozen=True):
    command: str = ""
    date: str = ""
    commit: str = ""
    versions: dict[str, str] = {}


class SavedResult(Struct, frozen=True):
    """A page's parts; what a bench has not measured is empty."""

    settings: list[MeasuredSetting] = []
    requests: list[RequestTimes] = []
    acceptance: list[MeasuredAcceptance] = []
    run: Made = Made()
    machine: dict[str, Any] = {}
    pace: str | None = None
    target: str | None = None
    draft: str | None = None
    model: str | None = None  # as a server calls it
    dtype: str | None = None
    prompts: Any = None  # these are shown, whatever they are
    seed: Any = None
    temperature: Any = None
    max_tokens: Any = None
    invalid: str = ""  # why the run says nothing

    @property
    def measured(self) -> list[MeasuredSetting | RequestTimes]:
        return [*self.settings, *self.requests]

    @property
    def names(self) -> list[str]:
        """Settings in order, off first."""
        found = dict.fromkeys(one.setting for one in self.measured)
        return sorted(found, key=lambda name: name != OFF)

    @property
    def loads(self) -> list[float]:
        return sorted({one.load for one in self.measured})


def saved_result(text: str | bytes, place: str) -> SavedResult:
    """Of a bench's JSON; ParameterError, naming `place`, for one that no page can be drawn from."""
    try:
        result = msgspec.json.decode(text, type=SavedResult)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ParameterError("result", place, f"JSON of bench run, tune or serve ({error})") from error
    if not (result.settings or result.requests):
        raise ParameterError("result", place, "JSON of bench run, tune or serve: it has neither settings nor requests")
    return result
