"""What a page is drawn from: the parts of a bench's JSON that it needs. Times are seconds from a round's beginning."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from pilotfish.errors import ParameterError

OFF = "off"


class MeasuredSetting(Struct, frozen=True, kw_only=True):
    """A setting under one load: so many at a time, or so many a second. Spreads are those of `bench.report.Spread`."""

    setting: str
    concurrency: int | None = None
    rate: float | None = None
    tokens_per_second: dict[str, float] | float
    over_off: dict[str, float] | None = None
    tokens_per_verify_step: float | None = None
    nodes: float | None = None
    hit_share: float | None = None
    equal_outputs: float | None = None
    overruns: float = 0.0

    @property
    def load(self) -> float:
        return self.concurrency or self.rate or 0

    @property
    def speed(self) -> float:
        """Tokens a second, the median."""
        found = self.tokens_per_second
        return found["median"] if isinstance(found, dict) else found


class RequestTimes(Struct, frozen=True, kw_only=True):
    """A request. One that failed has an `error`, and maybe no tokens."""

    setting: str
    concurrency: int | None = None
    rate: float | None = None
    round: int = 0
    category: str = ""
    sent: float
    first: float | None
    ended: float
    times: list[float]  # [tokens]; those that came together have one time
    error: str | None = None

    @property
    def load(self) -> float:
        return self.concurrency or self.rate or 0

    @property
    def arrivals(self) -> list[tuple[float, int]]:
        """Moments at which tokens came, and how many."""
        return [(at, len(list(same))) for at, same in groupby(self.times)]


class DepthCounts(Struct, frozen=True):
    """Of trees: how many reached a depth, and how many had a guess accepted there. Depth d is at index d - 1."""

    offered: list[int]
    accepted: list[int]


class MeasuredAcceptance(Struct, frozen=True, kw_only=True):
    """Of a setting under one load, where it is known."""

    setting: str
    concurrency: int | None = None
    rate: float | None = None
    by_depth: DepthCounts | None = None

    @property
    def load(self) -> float:
        return self.concurrency or self.rate or 0


class DrawnStep(Struct, frozen=True):
    """A step of the target. Between `began` and `forward` it is planned, and in sync drafted from `planned` on."""

    began: float
    planned: float
    drafted: float
    forward: float
    ended: float
    sequences: int
    nodes: int
    depth: int
    offered: int
    accepted: int
    committed: int
    hits: int


class DrawnLevel(Struct, frozen=True):
    began: float
    ended: float
    leaves: int


class TimelineWindow(Struct, frozen=True):
    """Steps of a target in a row, and the levels of its draft meanwhile; times are from its beginning."""

    setting: str
    concurrency: int
    steps: list[DrawnStep]
    levels: list[DrawnLevel]


class Made(Struct, frozen=True):
    """How a result came about."""

    command: str = ""
    date: str = ""
    commit: str = ""
    versions: dict[str, str] = {}


class SavedResult(Struct, frozen=True):
    """A page's parts; what a bench has not measured is empty."""

    settings: list[MeasuredSetting] = []
    requests: list[RequestTimes] = []
    acceptance: list[MeasuredAcceptance] = []
    windows: list[TimelineWindow] = []
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


def read_result(path: Path) -> SavedResult:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ParameterError("result", str(path), f"a file that can be read ({error.strerror})") from error
    return saved_result(text, str(path))
