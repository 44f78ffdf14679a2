"""The three-fold decomposition of a difference: Kitagawa, "Components of a Difference Between Two Rates", JASA 50
(1955); Oaxaca, "Male-Female Wage Differentials in Urban Labor Markets", International Economic Review 14 (1973);
Blinder, "Wage Discrimination", Journal of Human Resources 8 (1973). For products of rates: Das Gupta, "Standardization
and Decomposition of Rates", US Bureau of the Census P23-186 (1993), chapter 2.

With shares w and rates r, before (0) and after (1), and the mean R = sum of w · r:

    R1 - R0 = sum (w1 - w0) · r0  +  sum w0 · (r1 - r0)  +  sum (w1 - w0) · (r1 - r0)
                    mix                   within                 interaction
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from math import fsum, prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Portions:
    """A ratio by cohort: accepted tokens over steps. Both [cohorts]."""

    amounts: Floats
    weights: Floats  # at least one is above 0; a cohort whose weight is 0 is absent

    @cached_property
    def shares(self) -> Floats:
        return self.weights / float(self.weights.sum())

    @cached_property
    def rates(self) -> Floats:
        return np.divide(self.amounts, self.weights, out=np.zeros(len(self.weights)), where=self.present)

    @cached_property
    def present(self) -> NDArray[np.bool_]:
        return self.weights > 0

    @cached_property
    def mean(self) -> float:
        return fsum(self.amounts) / fsum(self.weights)


@dataclass(frozen=True)
class Decomposition:
    """Both portions have the same cohorts in the same order. A cohort that one lacks is taken to have changed as the
    common cohorts did, weighted by their mean shares; without common cohorts, all is mix."""

    before: Portions
    after: Portions

    @cached_property
    def change(self) -> float:
        return self.after.mean - self.before.mean

    @cached_property
    def common(self) -> NDArray[np.bool_]:
        return self.before.present & self.after.present

    @cached_property
    def share_changes(self) -> Floats:
        return self.after.shares - self.before.shares

    @cached_property
    def rate_changes(self) -> Floats:
        """[cohorts]"""
        changes = np.where(self.common, self.after.rates - self.before.rates, 0.0)
        shared = (self.before.shares + self.after.shares) / 2
        return np.where(self.common, changes, fsum(shared * changes))

    @cached_property
    def rates_before(self) -> Floats:
        """[cohorts]; estimated for new cohorts."""
        return np.where(self.before.present, self.before.rates, self.after.rates - self.rate_changes)

    @cached_property
    def drift_weights(self) -> Floats:
        """[cohorts]: with them rate changes of common cohorts add up to `within` and `interaction` together."""
        shared = (self.before.shares + self.after.shares) / 2
        new = fsum(self.after.shares[~self.common])
        return np.where(self.common, self.after.shares + new * shared, 0.0)

    @cached_property
    def mixes(self) -> Floats:
        return self.share_changes * (self.rates_before - self.before.mean)

    @property
    def mix(self) -> float:
        return fsum(self.mixes)

    @property
    def within(self) -> float:
        return fsum(self.before.shares * self.rate_changes)

    @property
    def interaction(self) -> float:
        return fsum(self.share_changes * self.rate_changes)


def product_effects(before: Sequence[float], after: Sequence[float]) -> list[float]:
    """Each factor's part of the product's change: its mean over all orders of changing the factors one by one."""
    orders = list(permutations(range(len(before))))
    steps: list[list[float]] = [[] for _ in before]
    for order in orders:
        factors = list(before)
        for place in order:
            others = prod(factors[:place] + factors[place + 1 :])
            steps[place].append((after[place] - factors[place]) * others)
            factors[place] = after[place]
    return [fsum(found) / len(orders) for found in steps]
