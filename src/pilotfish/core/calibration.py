"""What forwards cost and how often guesses are right, learned while serving."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping

import numpy as np

from pilotfish.core.tree import Floats, Ints


class StepCosts:
    """Seconds of a forward by its rows: measured knots, straight lines between them, never falling.

    T │            ·           An observation between two knots moves both, the nearer one more,
      │      ·    /            by the ratio of what was seen to what was expected.
      │ ·──·─────·             Where a larger forward is seen to cost less than a smaller one was
      └─┴──┴─────┴──── rows    believed to, the belief gives way.
    """

    RATE = 0.1  # share of an observed deviation that is taken over; of a knot's first ones more
    COMMON = 0.7  # of that what all knots take over: longer contexts and busier machines slow every forward
    FAR = 1.5  # times the last knot's rows: from there on a row count becomes a knot of its own
    OUTLIER = 2.0  # deviations beyond this factor count as this factor: a descheduled step says nothing

    def __init__(self, seconds: Mapping[int, float], padded: Callable[[int], int] = lambda rows: rows) -> None:
        """`seconds` by rows, one at least; `padded` gives the rows that the device runs for a row count."""
        self._rows = sorted(seconds)
        self._seconds = np.maximum.accumulate([seconds[rows] for rows in self._rows])
        self._counts = np.ones(len(self._rows))
        self._padded = padded

    def at(self, rows: int) -> float:
        """Seconds of a forward of `rows`; beyond the last knot in proportion to its slope from the first."""
        return float(self.over(np.array([rows]))[0])

    def over(self, rows: Ints) -> Floats:
        """The same for many row counts, ascending."""
        places = np.array([self._padded(int(r)) for r in rows], np.float64)
        inside = np.interp(places, self._rows, self._seconds)
        slope = (self._seconds[-1] - self._seconds[0]) / max(self._rows[-1] - self._rows[0], 1)
        return np.asarray(inside + np.maximum(places - self._rows[-1], 0.0) * slope)

    def observe(self, rows: int, seconds: float) -> None:
        """A forward of `rows` took `seconds`. Far beyond the last knot it becomes one."""
        if self._padded(rows) > self.FAR * self._rows[-1]:
            self._rows.append(self._padded(rows))
            self._seconds = np.append(self._seconds, max(seconds, self._seconds[-1]))
            self._counts = np.append(self._counts, 1.0)
        ratio = min(max(seconds / self.at(rows), 1 / self.OUTLIER), self.OUTLIER)
        self._seconds *= ratio ** (self.RATE * self.COMMON)
        for knot, weight in self._neighbours(self._padded(rows)):
            self._counts[knot] += weight
            seen = self._seconds[knot] * ratio ** (weight * (1 - self.COMMON) * max(self.RATE, 1 / self._counts[knot]))
            self._seconds[:knot] = np.minimum(self._seconds[:knot], seen)
            self._seconds[knot:] = np.maximum(self._seconds[knot:], seen)
            self._seconds[knot] = seen

    def _neighbours(self, rows: int) -> list[tuple[int, float]]:
        """Knots beside `rows` and their shares in it."""
        right = bisect.bisect_left(self._rows, rows)
        if right == len(self._rows):
            return [(right - 1, 1.0)]
        if self._rows[right] == rows or right == 0:
            return [(right, 1.0)]
        share = (rows - self._rows[right - 1]) / (self._rows[right] - self._rows[right - 1])
        return [(right - 1, 1.0 - share), (right, share)]


class Calibration:
    """How often nodes of a score turn out to be on the accepted path. A drafter's score is the log of the chance
    that it believes in; bins of a tenth of e hold what came of it, each with a prior of `PRIOR` nodes that did as
    believed, and old counts fade by `DECAY` a step."""

    WIDTH, BINS, PRIOR, DECAY = 0.1, 60, 10.0, 0.999

    def __init__(self) -> None:
        believed = np.exp(-(np.arange(self.BINS) + 0.5) * self.WIDTH)
        self._prior = believed * self.PRIOR
        self._hits = np.zeros(self.BINS)
        self._seen = np.zeros(self.BINS)

    def chances(self, scores: Floats) -> Floats:
        """Calibrated chances of nodes."""
        table = (self._hits + self._prior) / (self._seen + self.PRIOR)
        return np.asarray(table[self._bins(scores)])

    def observe(self, verified: Floats, accepted: Floats) -> None:
        """Scores of the nodes that a step verified, and of those among them that were on an accepted path."""
        if not len(verified):
            return
        self._hits *= self.DECAY
        self._seen *= self.DECAY
        self._seen += np.bincount(self._bins(verified), minlength=self.BINS)
        self._hits += np.bincount(self._bins(accepted), minlength=self.BINS)

    def _bins(self, scores: Floats) -> Ints:
        depths = -scores / self.WIDTH
        return np.clip(depths, 0, self.BINS - 1).astype(np.int64)


class GainCurve:
    """Tokens that a sequence gains a step from its k best nodes: the mean of their calibrated chances by rank."""

    RATE = 0.02

    def __init__(self, nodes: int, first: float, falls: float) -> None:
        """Believed at first: chances first, first * falls, … of the best node, the second, …"""
        self._by_rank = first * falls ** np.arange(nodes)
        self._count = 0

    def observe(self, chances: Floats, sizes: Ints) -> None:
        """Chances of the nodes of a step's trees, one tree after the other, `sizes` nodes each."""
        table = np.zeros((len(sizes), max(len(self._by_rank), int(sizes.max()))))
        places = np.arange(len(chances)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        table[np.repeat(np.arange(len(sizes)), sizes), places] = chances
        table.sort(axis=1)
        ranked = table[:, ::-1][:, : len(self._by_rank)].mean(axis=0)
        self._count += len(sizes)
        share = 1 - (1 - max(self.RATE, 1 / (self._count + 3))) ** len(sizes)
        self._by_rank += share * (ranked - self._by_rank)

    def forget(self) -> None:
        """Believe less of what was seen: it is some time ago."""
        self._count = min(self._count, 2)

    def gain(self, nodes: Floats) -> Floats:
        """Expected tokens from the best `nodes` (fractions of a node too) of one sequence."""
        total = np.concatenate(([0.0], np.cumsum(self._by_rank)))
        return np.asarray(np.interp(nodes, np.arange(len(total)), total))


class SecondsBySize:
    """Mean seconds of something by how many it is done for, in powers of two: of all values at first, then of about
    the last 1 / RATE."""

    RATE = 0.1
    OUTLIER = 2.0

    def __init__(self, believed: float) -> None:
        self._believed = believed
        self._means: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def at(self, size: int) -> float:
        """As measured for as many or for the nearest number; as believed where nothing was measured."""
        if not self._means:
            return self._believed
        return self._means[min(self._means, key=lambda known: abs(known - size.bit_length()))]

    def observe(self, size: int, seconds: float) -> None:
        key = size.bit_length()
        self._counts[key] = self._counts.get(key, 0) + 1
        mean = self._means.get(key, seconds)
        seen = min(seconds, self.OUTLIER * mean)  # a draft that reads a new prompt says nothing of its levels
        self._means[key] = mean + max(self.RATE, 1 / self._counts[key]) * (seen - mean)
