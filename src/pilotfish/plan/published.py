"""A row of `published.toml` `calibrates` a constant of an engine, is `predicted` by constants of other rows or
assumptions, or `lacks` an input. The model's authors knew all rows: predictions are not fitted, but not blind."""

from collections.abc import Iterator
from statistics import mean
from typing import Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from pilotfish.config.hardware.tables import Sourced, read_table
from pilotfish.plan.predicting import AnyInputs

Kind = Literal["calibrates", "predicted", "lacks"]
#: Decoding without guesses, one forward of a speculating engine, rounds of speculation, or none of these.
Mode = Literal["plain", "forward", "sync", "async", "other"]
#: Digits of a prediction that are kept in a file.
DIGITS = 6
#: Quantiles of the errors that bound a band.
QUANTILES = (0.1, 0.9)


class PublishedRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    what: str
    mode: Mode
    unit: str  # of the figure: tok/s, ms, x
    published: float | None = None
    inputs: AnyInputs | None = None  # None: it lacks one
    lacks: str = ""  # what its source does not say
    calibrates: str = ""  # `constant of engine@hardware`, or `tokens`, those of a round
    unverified: tuple[str, ...] = ()
    note: str = ""

    @property
    def kind(self) -> Kind:
        if self.inputs is None:
            return "lacks"
        return "calibrates" if self.calibrates else "predicted"

    @property
    def predicted(self) -> float | None:
        """In `unit`; None where an input lacks."""
        return None if self.inputs is None else float(f"{self.inputs.predict(self.unit):.{DIGITS}g}")

    @property
    def error(self) -> float | None:
        """Relative: 0.1 where the prediction is 10 % too high. None where either lacks."""
        predicted = self.predicted
        return None if predicted is None or self.published is None else predicted / self.published - 1


class PublishedGroup(Sourced, frozen=True, kw_only=True):
    about: str
    rows: dict[str, PublishedRow]


class ErrorSummary(Struct, frozen=True):
    rows: int
    mean: float  # absolute and relative
    most: float


GROUPS = read_table(__file__, "published", dict[str, PublishedGroup])
RUNS = read_table(__file__, "runs", dict[str, AnyInputs])
PUBLISHED = {name: replace(row, inputs=RUNS.get(name)) for group in GROUPS.values() for name, row in group.rows.items()}


class ErrorBand(Struct, frozen=True, kw_only=True):
    """A rate is `low` to `high` times the model's in eight of ten predicted rows."""

    rows: int
    low: float
    high: float


def error_band(*modes: Mode) -> ErrorBand:
    """Rows of times count by the rates that they imply."""
    ratios = [(1 + error) if row.unit == "ms" else 1 / (1 + error) for row, error in _errors() if row.mode in modes]
    low, high = np.quantile(ratios, QUANTILES)
    return ErrorBand(rows=len(ratios), low=float(low), high=float(high))


def summaries() -> dict[Mode, ErrorSummary]:
    errors: dict[Mode, list[float]] = {}
    for row, error in _errors():
        errors.setdefault(row.mode, []).append(abs(error))
    return {mode: ErrorSummary(len(of), mean(of), max(of)) for mode, of in errors.items()}


def _errors() -> Iterator[tuple[PublishedRow, float]]:
    for row in PUBLISHED.values():
        if row.kind == "predicted" and row.error is not None:
            yield row, row.error
