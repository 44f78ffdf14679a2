from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TypeAlias

import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray

from pilotfish.operate.explaining.cohorts import BY_DEPTH, DIMENSIONS, SUMS, Cell, CellKey
from pilotfish.operate.explaining.decomposition import Decomposition, Floats, Portions, product_effects
from pilotfish.operate.outcome import DEPTHS

#: Values of some dimensions, in their order.
Values: TypeAlias = tuple[str, ...]
_COLUMN = {name: column for column, name in enumerate(SUMS)}


@dataclass(frozen=True)
class CellSums:
    matrix: Floats  # [cohorts, SUMS, then both of BY_DEPTH]

    @classmethod
    def of(cls, keys: Sequence[CellKey], cells: Sequence[Cell]) -> "CellSums":
        places = {key: row for row, key in enumerate(keys)}
        matrix = np.zeros((len(keys), len(SUMS) + len(BY_DEPTH) * DEPTHS))
        for cell in cells:
            depths = chain.from_iterable(_padded(getattr(cell, name)) for name in BY_DEPTH)
            matrix[places[cell.key]] += [*(getattr(cell, name) for name in SUMS), *depths]
        return cls(matrix)

    def __getitem__(self, name: str) -> Floats:
        """[cohorts]"""
        return self.matrix[:, _COLUMN[name]]

    def by_depth(self, name: str) -> Floats:
        """[cohorts, DEPTHS]"""
        begin = len(SUMS) + BY_DEPTH.index(name) * DEPTHS
        return self.matrix[:, begin : begin + DEPTHS]

    def summed(self, groups: NDArray[np.intp], count: int) -> "CellSums":
        """`groups`: [cohorts], the group of each; none of the `count` groups is empty."""
        order = np.argsort(groups, kind="stable")
        begins = np.searchsorted(groups[order], np.arange(count))
        return CellSums(np.add.reduceat(self.matrix[order], begins, axis=0))

    def where(self, chosen: NDArray[np.bool_]) -> "CellSums":
        """One row: the sums over the chosen cohorts. `chosen`: [cohorts]."""
        return CellSums(self.matrix[chosen].sum(axis=0, keepdims=True))

    @cached_property
    def portions(self) -> Portions:
        return Portions(self["accepted"], self["steps"])

    @cached_property
    def variances(self) -> Floats:
        """[cohorts]: variance of each rate, by the delta method over requests (Cochran, "Sampling Techniques", 3rd
        edition, section 2.11). Cohorts share one variance of a request, as many of them have few requests."""
        rates = self.portions.rates  # squares: of accepted - rate · steps, summed over requests
        squares = self["accepted_squared"] - 2 * rates * self["accepted_steps"] + rates**2 * self["steps_squared"]
        free = (self["steps_squared"] * (1 - 1 / np.maximum(self["requests"], 1))).sum()
        known = np.maximum(squares, 0.0) if free else self["accepted_squared"]  # of one request each no rate is known
        variance = known.sum() / (free or self["steps_squared"].sum())
        variances: Floats = variance * self["steps_squared"] / np.maximum(self["steps"], 1.0) ** 2
        return variances

    def variance_of_mean(self, scores: Floats) -> float:
        """Variance of the mean score over steps of randomly drawn requests. `scores`: [cohorts]."""
        spread = scores - self.portions.shares @ scores
        return float(self["steps_squared"] @ spread**2 / self["steps"].sum() ** 2)

    def factors(self) -> Floats:
        """[cohorts, 3], factors of accepted tokens a step: wanted trees a step, trees in time of those, accepted tokens
        of a tree. NaN: nothing to divide by."""
        wanted = self["trees"] + self["late"]
        pairs = ((wanted, self["steps"]), (self["trees"], wanted), (self["accepted"], self["trees"]))
        found = [np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0) for part, whole in pairs]
        return np.stack(found, axis=1)


@dataclass(frozen=True)
class PairedCells:
    keys: Sequence[Values]  # what tells the cohorts apart, by `dimensions`
    dimensions: Values
    before: CellSums
    after: CellSums

    @classmethod
    def of(cls, before: Sequence[Cell], after: Sequence[Cell]) -> "PairedCells":
        keys = list(dict.fromkeys(cell.key for cell in (*before, *after)))
        return cls([astuple(key) for key in keys], DIMENSIONS, CellSums.of(keys, before), CellSums.of(keys, after))

    def by(self, *dimensions: str) -> "PairedCells":
        columns = [[key[place] for key in self.keys] for place in map(self.dimensions.index, dimensions)]
        values: list[Values] = list(zip(*columns, strict=True)) if columns else [()] * len(self.keys)
        places = {value: place for place, value in enumerate(dict.fromkeys(values))}
        groups = np.array([places[value] for value in values], np.intp)
        sums = [side.summed(groups, len(places)) for side in (self.before, self.after)]
        return PairedCells(list(places), dimensions, *sums)

    def holds(self, dimension: str, values: Sequence[str]) -> NDArray[np.bool_]:
        """[cohorts]: whether each has one of these values."""
        place = self.dimensions.index(dimension)
        return np.array([key[place] in values for key in self.keys], np.bool_)

    @cached_property
    def decomposition(self) -> Decomposition:
        return Decomposition(self.before.portions, self.after.portions)

    @cached_property
    def guessing(self) -> NDArray[np.bool_]:
        wanted = [side["trees"] + side["late"] for side in (self.before, self.after)]
        return np.greater(wanted[0] + wanted[1], 0)

    @cached_property
    def variances(self) -> Floats:
        """[cohorts]"""
        return self.before.variances + self.after.variances

    @cached_property
    def factor_changes(self) -> Floats:
        """[cohorts, factors]: parts of the change of a rate; 0 where a cohort is not common. A factor that one side
        lacks is taken from the other."""
        before, after = self.before.factors(), self.after.factors()
        pairs = zip(_known(before, after), _known(after, before), self.decomposition.common, strict=True)
        nothing = [0.0] * before.shape[1]
        changes = [product_effects(old, new) if common else nothing for old, new, common in pairs]
        return np.array(changes, np.float64)


def _known(factors: Floats, others: Floats) -> list[list[float]]:
    found: list[list[float]] = np.nan_to_num(np.where(np.isnan(factors), others, factors)).tolist()
    return found


def _padded(counts: Sequence[int]) -> list[int]:
    head = [*counts[: DEPTHS - 1], *[0] * (DEPTHS - 1 - len(counts))]
    return [*head, sum(counts[DEPTHS - 1 :])]
