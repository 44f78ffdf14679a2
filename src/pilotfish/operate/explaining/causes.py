"""Changes of shares come first, dimension by dimension: the dimension whose mix explains most is taken, and the others
are asked for the rest, until none adds anything. Then changes of rates, by factor, at the shares of after; values of a
dimension are named if only they changed. Effects and rest add up to the change."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal, get_args

import numpy as np

from pilotfish.operate.explaining.decomposition import Floats
from pilotfish.operate.explaining.paired import PairedCells, Values
from pilotfish.operate.outcome import NONE

#: Standard errors of a difference that counts. About ten candidates are tried, so two would not do.
SURE = 3.0
#: Least part of the change that is a cause.
MATERIAL = 0.1
#: Part of an effect that the named values must have, the fewest that do.
MOST = 0.75
#: Most of the change of a rate elsewhere, relative to that at the named values.
ELSEWHERE = 1 / 3
#: Part of an effect from which on two dimensions cannot be told apart.
ALIKE = 0.9
#: By closeness to the guesses: of two dimensions that cannot be told apart the first is named.
DIRECTNESS = ("draft", "client", "output", "temperature", "context", "script", "tag", "variant")

Part = Literal["mix", "within"]
#: Of accepted tokens a step, which is their product: how many steps wanted a tree, how many of those had one in time,
#: how many tokens of a tree were accepted.
Factor = Literal["wanted", "late", "right"]
FACTORS: tuple[Factor, ...] = get_args(Factor)


@dataclass(frozen=True)
class FoundCause:
    part: Part
    factor: Factor
    effect: float  # accepted tokens a step
    dimension: str | None = None  # None: everywhere
    values: Values = ()
    alike: Values = ()  # dimensions that explain the same change as well


def find_causes(cells: PairedCells) -> list[FoundCause]:
    change = cells.by().decomposition.change
    mixes = list(_mixes(cells, change))
    within = _drifts(cells, [one.dimension for one in mixes], change)
    return sorted([*(_mix_cause(cells, one) for one in mixes), *within], key=lambda one: -abs(one.effect))


def _is_notable(effect: float, error: float, change: float) -> bool:
    return abs(effect) > SURE * error and abs(effect) > MATERIAL * abs(change)


def _is_like(effect: float, best: float) -> bool:
    return abs(effect - best) <= (1 - ALIKE) * abs(best)


def _leading(effects: Mapping[str, float], effect: float) -> Values:
    found: list[str] = []
    missing = MOST * abs(effect)
    for value in sorted(effects, key=lambda value: -effects[value] * np.sign(effect)):
        if missing <= 0:
            break
        found.append(value)
        missing -= effects[value] * np.sign(effect)
    return tuple(found)


def _by_value(cells: PairedCells, figures: Floats) -> dict[str, float]:
    """`figures`: [cohorts]."""
    sums: dict[str, float] = {}
    for key, figure in zip(cells.keys, figures.tolist(), strict=True):
        sums[key[-1]] = sums.get(key[-1], 0.0) + figure
    return sums


@dataclass(frozen=True)
class DimensionMix:
    dimension: str
    error: float  # standard error of the effect
    effects: Mapping[str, float]  # by value
    growth: Mapping[str, float]  # by value: change of its share of steps
    alike: Values = ()

    @property
    def effect(self) -> float:
        return sum(self.effects.values())

    @property
    def values(self) -> Values:
        sides = [{v: e for v, e in self.effects.items() if (self.growth[v] > 0) is up} for up in (True, False)]
        side = max(sides, key=lambda side: sum(side.values()) * np.sign(self.effect))
        return _leading(side, sum(side.values()))

    @property
    def rank(self) -> tuple[int, bool, int]:
        return len(self.values), NONE in self.values, DIRECTNESS.index(self.dimension)


def _mixes(cells: PairedCells, change: float) -> Iterator[DimensionMix]:
    chosen: list[str] = []
    candidates = [_mix(cells, [], name) for name in DIRECTNESS]
    while notable := [one for one in candidates if _is_notable(one.effect, one.error, change)]:
        most = max(abs(one.effect) for one in notable)
        best = min((one for one in notable if abs(one.effect) >= ALIKE * most), key=lambda one: one.rank)
        chosen.append(best.dimension)
        beyond = [_mix(cells, chosen, name) for name in DIRECTNESS if name not in chosen]
        spent = {one.dimension for one in beyond if _is_like(best.effect + one.effect, best.effect)}
        alike = [one.dimension for one in candidates if one.dimension in spent and _is_like(one.effect, best.effect)]
        yield replace(best, alike=tuple(alike))
        candidates = beyond


def _mix(cells: PairedCells, chosen: Sequence[str], dimension: str) -> DimensionMix:
    """A cohort's score: its rate less that of all with its values of the chosen dimensions."""
    finer, coarser = cells.by(*chosen, dimension), cells.by(*chosen)
    places = {key: place for place, key in enumerate(coarser.keys)}
    parts = finer.decomposition
    scores = parts.rates_before - coarser.decomposition.rates_before[[places[key[:-1]] for key in finer.keys]]
    variances = np.where(parts.before.present, finer.before.variances, finer.after.variances)
    sampled = finer.before.variance_of_mean(scores) + finer.after.variance_of_mean(scores)
    error = sqrt(sampled + parts.share_changes**2 @ variances)
    effects, growth = _by_value(finer, parts.share_changes * scores), _by_value(finer, parts.share_changes)
    return DimensionMix(dimension, error, effects, growth)


def _mix_cause(cells: PairedCells, mix: DimensionMix) -> FoundCause:
    """Its factor is the one in which the named values differ most from all before."""
    held = cells.holds(mix.dimension, mix.values)
    named = cells.before.where(held) if cells.before["steps"][held].any() else cells.after.where(held)
    differences = PairedCells([()], (), cells.by().before, named).factor_changes[0]
    factor = FACTORS[int(np.argmax(differences * np.sign(differences.sum())))]
    return FoundCause("mix", factor, mix.effect, mix.dimension, mix.values, mix.alike)


@dataclass(frozen=True)
class Place:
    dimension: str
    values: Values
    effect: float
    share: float  # of steps

    @property
    def rank(self) -> tuple[int, float, int]:
        return len(self.values), round(self.share, 2), DIRECTNESS.index(self.dimension)


def _drifts(cells: PairedCells, chosen: Sequence[str], change: float) -> Iterator[FoundCause]:
    table = cells.by(*chosen)
    weights = table.decomposition.drift_weights
    error = sqrt(weights**2 @ table.variances)
    for factor, effect in zip(FACTORS, (weights @ table.factor_changes).tolist(), strict=True):
        if _is_notable(effect, error, change):
            yield _placed(cells, chosen, factor, effect)


def _placed(cells: PairedCells, chosen: Sequence[str], factor: Factor, effect: float) -> FoundCause:
    places = [place for name in DIRECTNESS if (place := _place(cells, chosen, name, factor)) is not None]
    if not places:
        return FoundCause("within", factor, effect)
    best = min(places, key=lambda place: place.rank)
    like = [one.dimension for one in places if one is not best and _is_like(one.effect, best.effect)]
    return FoundCause("within", factor, best.effect, best.dimension, best.values, tuple(like))


def _place(cells: PairedCells, chosen: Sequence[str], dimension: str, factor: Factor) -> Place | None:
    """The fewest values with most of a factor's effect, if it surely changed far less elsewhere. Requests that never
    wanted a tree, as the holdout's, are no evidence of that."""
    table = cells.by(*(name for name in chosen if name != dimension), dimension)
    weights = np.where(table.guessing, table.decomposition.drift_weights, 0.0)
    effects = weights * table.factor_changes[:, FACTORS.index(factor)]
    values = _leading(_by_value(table, effects), float(effects.sum()))
    inside = table.holds(dimension, values)
    held, left = float(weights[inside].sum()), float(weights[~inside].sum())
    if held == 0 or left == 0:
        return None
    effect = float(effects[inside].sum())
    elsewhere = abs(effects[~inside].sum()) + 2 * sqrt(weights[~inside] ** 2 @ table.variances[~inside])
    if elsewhere / left > ELSEWHERE * abs(effect) / held:
        return None
    return Place(dimension, values, effect, held / (held + left))
