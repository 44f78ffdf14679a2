"""How far the model is from published figures, as factors on its rates: quantiles of its errors on predicted rows."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from pilotfish.plan.planner.deployment import Mode
from pilotfish.plan.published import PUBLISHED, PublishedRow
from pilotfish.plan.published import Mode as PublishedMode

#: Of the errors, from which to which a band goes.
QUANTILES = (0.1, 0.9)
#: Rows whose errors stand for a mode's. Plain decoding has three; single forwards of engines that speculate are added.
ROWS: dict[Mode, tuple[PublishedMode, ...]] = {"off": ("plain", "forward"), "sync": ("sync",), "async": ("async",)}


class ErrorBand(Struct, frozen=True, kw_only=True):
    """A rate is `low` to `high` times the model's in eight of ten predicted rows."""

    rows: int
    low: float
    high: float


def error_band(mode: Mode) -> ErrorBand:
    factors = [1 / _over(row) for row in PUBLISHED.values() if row.kind == "predicted" and row.mode in ROWS[mode]]
    low, high = np.quantile(factors, QUANTILES)
    return ErrorBand(rows=len(factors), low=float(low), high=float(high))


def _over(row: PublishedRow) -> float:
    """A predicted rate over the published one; for a row of times, the rates that these are."""
    assert row.predicted is not None and row.published is not None
    return row.published / row.predicted if row.unit == "ms" else row.predicted / row.published
