"""How many leaves a draft's level takes: as many as pay."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import numpy as np

from pilotfish.core.scheduling.calibration import StepCosts


class LevelCosts(StepCosts):
    """Every knot learns from its own levels alone: where all have become slower, widths that were not seen lately look
    cheap, are tried, and learn it too."""

    COMMON = 0.0


class LevelWidth:
    """Chooses the width whose leaves, by the sum of their chances, bring most a second.

    chances  ▇ ▅ ▃ ▂ ▂ ▁ ▁ ▁      A device that waits for its memory takes as long for one leaf as for all, and takes
    seconds  ─────────────/       all. One that is bound by arithmetic takes longer for each, and leaves out those that
    width    └── 1 … most         bring less for their time than the others do.
    """

    FLAT = 1.02  # a level of all leaves over one of a single leaf: up to here all are taken, unseen
    REFRESHED = 16  # levels after which the costs are looked at anew

    def __init__(self, most: int) -> None:
        self.most = most
        self._widths = np.arange(1, most + 1)
        self._costs: LevelCosts | None = None
        self._observed = 0
        self._seconds = [1.0] * most  # of a level by its width

    def observe(self, rows: int, seconds: float) -> None:
        """A level of `rows`, 1 to `most`, took `seconds`, and what goes on between two levels."""
        if self._costs is None:
            knots = {self.most, *(1 << exponent for exponent in range(self.most.bit_length()))}
            self._costs = LevelCosts(dict.fromkeys(knots, seconds))
        self._costs.observe(rows, seconds)
        self._observed += 1
        if self._observed % self.REFRESHED == 0:
            self._seconds = self._costs.over(self._widths).tolist()

    def best(self, chances: Iterable[float]) -> int:
        """Leaves that pay, 1 at least. `chances` of the leaves that there are, likeliest first."""
        if self._seconds[-1] <= self.FLAT * self._seconds[0]:
            return self.most
        best, most_a_second, gain = 1, 0.0, 0.0
        for width, chance in enumerate(islice(chances, self.most), 1):
            gain += chance
            if gain / self._seconds[width - 1] > most_a_second:
                best, most_a_second = width, gain / self._seconds[width - 1]
        return best
