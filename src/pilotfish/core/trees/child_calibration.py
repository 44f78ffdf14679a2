"""Calibration of a draft's chances by the children's depth and rank, learned while serving.

A head trained on soft labels believes too little in its best guess, one that feeds on its own states too much in deep
ones; trees ranked by such chances can be worse than a plain chain. This counts, for each depth and rank, how often the
target's token was there, and how often the draft believed so.

    depth 1   rank 0 1 2 …      believed .60 .15 .05     was there .72 .11 .04     chances there times 1.2, .73, .8
    depth 2   rank 0 1 2 …      …
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pilotfish.core.trees.tree import Floats, Ints

#: Deeper nodes, and siblings further back, are counted with the last.
DEPTHS, RANKS = 12, 12
#: Prior children of each place, counted as believed; and the share of a count that is kept with each commit.
PRIOR, DECAY = 4.0, 0.9995
TENANTS = 512  # tenants whose counts are kept; those who drafted longest ago give way


@dataclass(frozen=True)
class ChildOutcome:
    depth: int  # below the root, from 1; where a tree outlives commits it was more when it was guessed
    log_chances: list[float]  # of the children that were guessed there, likeliest first, as they were calibrated
    rank: int  # of the target's own token among them; -1: it was none of them


class ChildCalibration:
    """Counts greedy sequences by themselves, as their chances differ."""

    def __init__(self) -> None:
        self._believed = np.zeros((2, DEPTHS, RANKS))
        self._seen = np.zeros_like(self._believed)
        self._log_factors = np.zeros_like(self._believed)

    def calibrated(self, greedy: NDArray[np.bool_], depths: Ints, log_chances: Floats) -> Floats:
        """Of [leaves, children] at `depths` [leaves]; chances fall along a leaf's children, and sum to at most 1."""
        ranks = np.minimum(np.arange(log_chances.shape[1]), RANKS - 1)
        factors = self._log_factors[greedy.astype(int)[:, None], np.minimum(depths, DEPTHS)[:, None] - 1, ranks]
        scaled = log_chances + factors
        together = np.log(np.maximum(np.exp(scaled).sum(axis=1, keepdims=True), 1.0))
        return np.asarray(scaled - together)

    def observe(self, greedy: bool, outcomes: Iterable[ChildOutcome]) -> None:
        believed, seen, factors = (x[int(greedy)] for x in (self._believed, self._seen, self._log_factors))
        for outcome in outcomes:
            depth, count = min(outcome.depth, DEPTHS) - 1, min(len(outcome.log_chances), RANKS)
            own = np.array(outcome.log_chances[:count]) - factors[depth, :count]
            believed[depth] *= DECAY
            seen[depth] *= DECAY
            believed[depth, :count] += np.exp(np.minimum(own, 0.0))
            if 0 <= outcome.rank < count:
                seen[depth, outcome.rank] += 1
            factors[depth] = np.log((seen[depth] + PRIOR) / (believed[depth] + PRIOR))


class TenantCalibrations:
    """One calibration each, so that no tenant's commits make another's trees worse."""

    def __init__(self) -> None:
        self._by_tenant: OrderedDict[str, ChildCalibration] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_tenant)

    def of(self, tenant: str) -> ChildCalibration:
        if (found := self._by_tenant.get(tenant)) is None:
            found = self._by_tenant[tenant] = ChildCalibration()
        self._by_tenant.move_to_end(tenant)
        if len(self._by_tenant) > TENANTS:
            self._by_tenant.popitem(last=False)
        return found

    def calibrated(
        self, tenants: NDArray[np.str_], greedy: NDArray[np.bool_], depths: Ints, log_chances: Floats
    ) -> Floats:
        """Like ChildCalibration's, with the leaves' tenants [leaves]."""
        chances = np.empty(log_chances.shape)
        for tenant in np.unique(tenants):
            own = tenants == tenant
            chances[own] = self.of(str(tenant)).calibrated(greedy[own], depths[own], log_chances[own])
        return chances
