"""The cost model held against published figures: `published.toml`, and what `runs.toml` says of the runs.

A row `calibrates` one constant of an engine, is `predicted` from constants that other rows or assumptions give, or
`lacks` an input that its source does not say. All rows were known to the authors of the model before it was made: a
prediction here is one that nothing was fitted to, not one that was made blind.
"""

from __future__ import annotations

from statistics import mean
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from pilotfish.config.hardware.tables import Sourced, read_table
from pilotfish.plan.predicting import AnyInputs

Kind = Literal["calibrates", "predicted", "lacks"]
#: Decoding without guesses, one forward of a speculating engine, rounds of speculation, or none of these.
Mode = Literal["plain", "forward", "sync", "async", "other"]
#: Digits of a prediction that are kept in a file.
DIGITS = 6


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
        """By the model, in `unit`; None where an input lacks."""
        return None if self.inputs is None else float(f"{self.inputs.predict(self.unit):.{DIGITS}g}")

    @property
    def error(self) -> float | None:
        """Relative: 0.1 where the prediction is 10 % too high. None where either lacks."""
        predicted = self.predicted
        return None if predicted is None or self.published is None else predicted / self.published - 1


class PublishedGroup(Sourced, frozen=True, kw_only=True):
    """Rows with the same sources."""

    about: str
    rows: dict[str, PublishedRow]


class ErrorSummary(Struct, frozen=True):
    """Of the rows of a mode that were predicted."""

    rows: int
    mean: float  # absolute and relative
    most: float


GROUPS = read_table("published", dict[str, PublishedGroup])
RUNS = read_table("runs", dict[str, AnyInputs])
PUBLISHED = {name: replace(row, inputs=RUNS.get(name)) for group in GROUPS.values() for name, row in group.rows.items()}


def predictions() -> dict[str, float]:
    """Of all rows that the model has predictions of, without what was published."""
    made = {name: row.predicted for name, row in PUBLISHED.items()}
    return {name: value for name, value in made.items() if value is not None}


def summaries() -> dict[Mode, ErrorSummary]:
    """By mode."""
    errors: dict[Mode, list[float]] = {}
    for row in PUBLISHED.values():
        if row.kind == "predicted" and row.error is not None:
            errors.setdefault(row.mode, []).append(abs(row.error))
    return {mode: ErrorSummary(len(of), mean(of), max(of)) for mode, of in errors.items()}
