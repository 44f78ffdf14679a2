"""Paces: the times of forwards on an emulated device, as text: `target=10.4ms,draft=llama-3.2-1b@h200`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np

from pilotfish.config.hardware.cost import ForwardLoad, place
from pilotfish.errors import ParameterError

#: A time without rows holds for forwards of up to this many: those are bound by weights, not products.
FLAT_ROWS = 64
MAX_ROWS = 1 << 16
#: Tokens whose KV each forward of a named device reads.
CONTEXT = 512

_FORMS = (
    "target=PACE, draft=PACE, prefill=PACE or several, a PACE as in 10.4ms, 1:10.4ms/256:20ms or llama-3.1-70b@h200x4"
)
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_TIME = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)(us|ms|s)")


@dataclass(frozen=True)
class Pace:
    """Interpolated between knots, constant below the first, proportional to rows above the last."""

    text: str  # before it was parsed
    knots: Mapping[int, float]  # seconds by rows, one at least, rows ascending

    def seconds(self, rows: int) -> float:
        last = max(self.knots)
        if rows >= last:
            return self.knots[last] * rows / last
        return float(np.interp(rows, list(self.knots), list(self.knots.values())))

    @classmethod
    def parse(cls, text: str) -> "Pace":
        """`10.4ms` (for up to 64 rows), `1:10.4ms/256:20ms`, `model@device[x4]`, else ParameterError."""
        if "@" in text:
            return cls(text, _device_knots(text))
        if ":" not in text:
            return cls(text, {FLAT_ROWS: _seconds(text)})
        knots = list(map(_knot, text.split("/")))
        if any(a >= b for (a, _), (b, _) in pairwise(knots)):
            raise ParameterError("pace", text, "rows in ascending order, as in 1:10.4ms/256:20ms")
        return cls(text, dict(knots))


@dataclass(frozen=True)
class Paces:
    target: Pace | None = None  # None: as fast as the device itself
    draft: Pace | None = None
    prefill: Pace | None = None  # of prefill workers, which run the target's model

    @classmethod
    def parse(cls, text: str) -> "Paces":
        """`target=PACE`, `draft=PACE`, `prefill=PACE`, joined by commas, or "". ParameterError naming `pace`."""
        if text == "":
            return cls()
        parts = [part.partition("=") for part in text.split(",")] if isinstance(text, str) else []
        given = {role: pace for role, _, pace in parts}
        if not given or len(given) < len(parts) or not given.keys() <= {one.name for one in fields(cls)}:
            raise ParameterError("pace", text, _FORMS)
        return cls(**{role: Pace.parse(pace) for role, pace in given.items()})


def _knot(text: str) -> tuple[int, float]:
    rows, _, time = text.partition(":")
    if not (rows.isascii() and rows.isdecimal() and len(rows) < 6 and 1 <= int(rows) <= MAX_ROWS):
        raise ParameterError("pace", text, f"ROWS:TIME with 1 to {MAX_ROWS} rows, as in 32:11ms")
    return int(rows), _seconds(time)


def _seconds(text: str) -> float:
    match = _TIME.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise ParameterError("pace", text, _FORMS)
    return float(match[1]) * _UNITS[match[2]]


def _device_knots(text: str) -> dict[int, float]:
    """By the cost model, at powers of two, for one sequence of `CONTEXT` tokens. With experts, time grows unevenly."""
    placed = place(text)
    counts = [1 << power for power in range(MAX_ROWS.bit_length())]
    return {rows: placed.seconds(ForwardLoad(rows=rows, context=CONTEXT)) for rows in counts}
