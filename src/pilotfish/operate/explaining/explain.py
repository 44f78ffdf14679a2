"""Acceptance is accepted tokens a step, a ratio of sums, so that shares of cohorts are shares of steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from pilotfish.operate.explaining import explain_wording, explanation
from pilotfish.operate.explaining.causes import SURE, FoundCause, find_causes
from pilotfish.operate.explaining.cohorts import DIMENSIONS, Cell
from pilotfish.operate.explaining.explanation import Cause, CohortFigures, DimensionParts, Explanation, Kind, Verdict
from pilotfish.operate.explaining.paired import PairedCells

#: A change of this part of the greater mean matters. If the error could hide it there is too little data.
TELLABLE = 0.05
#: Least requests of a window: with fewer not even the error of a mean is known.
FEWEST = 30
#: Factor of the load within which a budget guesses as much as before.
LIKE_LOAD = 1.25
#: Kinds by the dimension whose shares changed; the others are a mix.
OF_SHARES: dict[str, Kind] = {
    "draft": "draft",
    "client": "client",
    "variant": "variant",
    "temperature": "temperature",
    "output": "structured",
    "context": "context",
}
#: Kinds by the dimension in which alone rates changed; elsewhere it is a drift.
OF_RATES: dict[str, Kind] = {"draft": "draft", "client": "client", "variant": "variant"}


def explain(before: Sequence[Cell], after: Sequence[Cell]) -> Explanation:
    """Causes are given only for a change that is sure (SURE) and large enough (TELLABLE)."""
    cells = PairedCells.of(before, after)
    if not (cells.before["steps"].any() and cells.after["steps"].any()):
        return Explanation(verdict="unclear", sentence=explain_wording.NOTHING)
    whole = cells.by()
    change, error = whole.decomposition.change, sqrt(whole.variances[0])
    both = _figures(cells, np.ones(len(cells.keys), np.bool_))
    verdict = _verdict(both, change, error)
    causes = [_cause(cells, found, change, both) for found in find_causes(cells)] if verdict == "changed" else []
    return Explanation(
        verdict=verdict,
        sentence=explain_wording.told(verdict, both.before, both.after, SURE * error, TELLABLE),
        before=both.before,
        after=both.after,
        change=change,
        error=error,
        causes=tuple(causes),
        rest=change - sum(one.effect for one in causes),
        parts=(*(_parts(cells, name, [name]) for name in DIMENSIONS), _parts(cells, "all", DIMENSIONS)),
    )


def _verdict(both: "BothFigures", change: float, error: float) -> Verdict:
    matters = TELLABLE * max(side.accepted_per_step or 0.0 for side in (both.before, both.after))
    width = SURE * error
    if min(both.before.requests, both.after.requests) < FEWEST or abs(change) <= width > matters:
        return "unclear"
    return "same" if abs(change) <= width or abs(change) + width <= matters else "changed"


def _parts(cells: PairedCells, name: str, dimensions: Sequence[str]) -> DimensionParts:
    found = cells.by(*dimensions).decomposition
    return DimensionParts(dimension=name, mix=found.mix, within=found.within, interaction=found.interaction)


@dataclass(frozen=True)
class BothFigures:
    before: CohortFigures
    after: CohortFigures


def _figures(cells: PairedCells, chosen: NDArray[np.bool_]) -> BothFigures:
    sides = (cells.before, cells.after)
    return BothFigures(*(CohortFigures.of(side.where(chosen), float(side["steps"].sum())) for side in sides))


def _cause(cells: PairedCells, found: FoundCause, change: float, both: BothFigures) -> Cause:
    own = both if found.dimension is None else _figures(cells, cells.holds(found.dimension, found.values))
    cause = Cause(
        kind=_kind(found, own),
        **vars(found),
        share=found.effect / change,
        before=own.before,
        after=own.after,
        depth=_depth(found, own, both) if found.factor == "right" else None,
    )
    return replace(cause, sentence=explain_wording.sentence(cause, both.before), advice=explain_wording.advice(cause))


def _depth(found: FoundCause, own: BothFigures, both: BothFigures) -> explanation.DepthLoss | None:
    """For a mix: how the values that grew differ from all; None where requests became fewer."""
    if found.part == "within":
        return explanation.depth_loss(own.before, own.after)
    if own.after.share < own.before.share:
        return None
    return explanation.depth_loss(both.before, own.before if own.before.requests else own.after)


def _kind(found: FoundCause, own: BothFigures) -> Kind:
    """A budget that wants fewer trees without more load means worse guesses."""
    if found.part == "mix":
        return OF_SHARES.get(found.dimension or "", "mix")
    loads = own.before.load or 0.0, own.after.load or 0.0
    is_like_load = 0 < max(loads) <= LIKE_LOAD * min(loads)
    if found.factor == "late" or (found.factor == "wanted" and not is_like_load):
        return found.factor
    return OF_RATES.get(found.dimension or "", "drift")
