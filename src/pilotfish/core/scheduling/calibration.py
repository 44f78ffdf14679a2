"""Costs of forwards and chances of guesses, learned while serving."""

import bisect
from collections.abc import Callable, Mapping

import numpy as np
from msgspec import Struct

from pilotfish.core.trees.tree import Floats, Ints


class ContextCosts(Struct, frozen=True):
    """Seconds that each token of a sequence's context adds to a forward: for its first row, and for a further one."""

    first: float = 0.0
    further: float = 0.0

    def seconds(self, context: int, further_rows: Floats | float) -> Floats | float:
        """Of sequences with `context` tokens together, and so many further rows each."""
        return context * (self.first + self.further * further_rows)


NO_CONTEXT = ContextCosts()


class StepCosts:
    """Seconds of a forward by its rows: measured knots, straight lines between them, never falling.

    T │            ·           An observation between two knots moves both, the nearer one more,
      │      ·    /            by the ratio of what was seen to what was expected.
      │ ·──·─────·             Where a larger forward is seen to cost less than a smaller one was
      └─┴──┴─────┴──── rows    believed to, the belief gives way.
    """

    RATE = 0.1  # share of an observed deviation that is taken over; of a knot's first ones more
    COMMON = 0.7  # share of it that all knots take over: busier machines slow every forward
    FAR = 1.5  # times the last knot's rows: from there on a row count becomes a knot of its own
    OUTLIER = 2.0  # deviations beyond this factor count as this factor: a descheduled step says nothing

    def __init__(
        self,
        seconds: Mapping[int, float],
        padded: Callable[[int], int] = lambda rows: rows,
        context: ContextCosts = NO_CONTEXT,
    ) -> None:
        """`seconds` of at least one row count, without context; `padded` gives the rows that the device runs."""
        self.context = context
        self._rows = sorted(seconds)
        self._seconds = np.maximum.accumulate([seconds[rows] for rows in self._rows])
        self._counts = np.ones(len(self._rows))
        self._padded = padded

    def at(self, rows: int) -> float:
        """Beyond the last knot proportional to its slope from the first."""
        return float(self.over(np.array([rows]))[0])

    def over(self, rows: Ints) -> Floats:
        places = np.array([self._padded(int(r)) for r in rows], np.float64)
        inside = np.interp(places, self._rows, self._seconds)
        slope = (self._seconds[-1] - self._seconds[0]) / max(self._rows[-1] - self._rows[0], 1)
        return np.asarray(inside + np.maximum(places - self._rows[-1], 0.0) * slope)

    def observe(self, rows: int, seconds: float, of_context: float = 0.0) -> None:
        """`of_context`: what `context` expects of the seconds. It may be wrong, as where sequences share a prefix."""
        if self._padded(rows) > self.FAR * self._rows[-1]:
            self._rows.append(self._padded(rows))
            self._seconds = np.append(self._seconds, max(seconds - of_context, self._seconds[-1]))
            self._counts = np.append(self._counts, 1.0)
        ratio = min(max(seconds / (self.at(rows) + of_context), 1 / self.OUTLIER), self.OUTLIER)
        common = ratio ** (self.RATE * self.COMMON)
        self._seconds *= common
        self.context = ContextCosts(common * self.context.first, common * self.context.further)
        for knot, weight in self._neighbours(self._padded(rows)):
            self._counts[knot] += weight
            seen = self._seconds[knot] * ratio ** (weight * (1 - self.COMMON) * max(self.RATE, 1 / self._counts[knot]))
            self._seconds[:knot] = np.minimum(self._seconds[:knot], seen)
            self._seconds[knot:] = np.maximum(self._seconds[knot:], seen)
            self._seconds[knot] = seen

    def _neighbours(self, rows: int) -> list[tuple[int, float]]:
        right = bisect.bisect_left(self._rows, rows)
        if right == len(self._rows):
            return [(right - 1, 1.0)]
        if self._rows[right] == rows or right == 0:
            return [(right, 1.0)]
        share = (rows - self._rows[right - 1]) / (self._rows[right] - self._rows[right - 1])
        return [(right - 1, 1.0 - share), (right, share)]


class Calibration:
    """How often nodes of a score, the log of the drafter's chance, are accepted. Bins of a tenth of e count
    outcomes, with priors of `PRIOR` nodes as believed. Counts fade by `DECAY` a step, and a bin remembers `MEMORY`
    nodes, so that many sequences together notice faster that a draft has become worse."""

    WIDTH, BINS, PRIOR, DECAY, MEMORY = 0.1, 60, 10.0, 0.999, 300.0

    def __init__(self) -> None:
        believed = np.exp(-(np.arange(self.BINS) + 0.5) * self.WIDTH)
        self._prior = believed * self.PRIOR
        self._counts = np.zeros((2, self.BINS))
        self._hits, self._seen = self._counts

    def chances(self, scores: Floats) -> Floats:
        table = (self._hits + self._prior) / (self._seen + self.PRIOR)
        return np.asarray(table[self._bins(scores)])

    def observe(self, verified: Floats, accepted: Floats) -> None:
        if not len(verified):
            return
        self._counts *= self.DECAY
        self._seen += np.bincount(self._bins(verified), minlength=self.BINS)
        self._hits += np.bincount(self._bins(accepted), minlength=self.BINS)
        self._counts *= self.MEMORY / np.maximum(self._seen, self.MEMORY)

    def forget(self) -> None:
        self._counts[:] = 0.0

    def _bins(self, scores: Floats) -> Ints:
        depths = -scores / self.WIDTH
        return np.clip(depths, 0, self.BINS - 1).astype(np.int64)


class MeansByRank:
    """Running means by rank in a tree. Ranks that a tree could not have keep their mean."""

    RATE = 0.02

    def __init__(self, believed: Floats) -> None:
        self.values = believed.copy()  # [ranks]
        self._counts = np.zeros(len(believed), np.int64)  # [ranks], trees seen

    def _learn(self, seen: Floats, trees: int) -> None:
        """`seen` [first ranks] is the mean over so many trees."""
        asked = len(seen)
        self._counts[:asked] += trees
        share = 1 - (1 - np.maximum(self.RATE, 1 / (self._counts[:asked] + 3))) ** trees
        self.values[:asked] += share * (seen - self.values[:asked])

    def forget(self, first: int) -> None:
        self._counts[first:] = np.minimum(self._counts[first:], 2)


class GainCurve(MeansByRank):
    """Tokens that a sequence gains a step from its k best nodes: means of calibrated chances by rank. The likeliest
    nodes of all trees are verified, so of n trees the n best nodes have rank 0, whosever they are."""

    def __init__(self, nodes: int, first: float, falls: float) -> None:
        """Believed at first: chances first, first * falls, … of the best node, the second, …"""
        super().__init__(np.asarray(first * falls ** np.arange(nodes), np.float64))

    def observe(self, chances: Floats, trees: int, asked: int) -> None:
        """Chances in `trees` that could have `asked` nodes each: fewer mean that no more were worth it."""
        ranked = np.zeros(trees * min(asked, len(self.values)))
        best = -np.sort(-chances)[: len(ranked)]
        ranked[: len(best)] = best
        self._learn(ranked.reshape(-1, trees).mean(axis=1), trees)

    def gain(self, nodes: Floats) -> Floats:
        """Expected tokens from a sequence's best `nodes`, which may be fractions."""
        total = np.concatenate(([0.0], np.cumsum(self.values)))
        return np.asarray(np.interp(nodes, np.arange(len(total)), total))


class LevelCurve(MeansByRank):
    """Levels of drafting that the k best nodes of each sequence take.

    levels │         ·──·   A chain takes a level for each node, a tree of several nodes a level fewer, a drafter of
           │   ·──·         whole blocks one for all of them. The deepest of the k best nodes says which part of the
           │·─              levels they took.
           └──────────── k
    """

    def __init__(self, nodes: int, levels: int) -> None:
        """Believed at first: chains, of at most so many levels."""
        super().__init__(np.minimum(np.arange(1.0, nodes + 1), levels))

    def observe(self, depths: Ints, trees: int, levels: int, asked: int) -> None:
        """`levels` gave nodes of `depths`, likeliest first, to so many trees that could have `asked` nodes."""
        if not len(depths):
            return
        deepest = np.maximum.accumulate(depths)
        last = np.minimum(np.arange(1, min(asked, len(self.values)) + 1) * trees, len(depths)) - 1
        self._learn(levels * deepest[last] / deepest[-1], trees)

    def levels(self, nodes: Floats) -> Floats:
        """Expected levels for the best `nodes` of each sequence, at least one."""
        known = np.maximum(self.values, 1.0)
        return np.asarray(np.interp(nodes, np.arange(1, len(known) + 1), known))


class RecentMean:
    """Of about the last `1 / rate` values; 0 before the first."""

    def __init__(self, rate: float = 0.05) -> None:
        self.value, self._rate, self._empty = 0.0, rate, True

    def add(self, value: float) -> None:
        self.value += (1.0 if self._empty else self._rate) * (value - self.value)
        self._empty = False


class RecentRate:
    """Tokens a second, over about the last `1 / (1 - kept)` forwards or steps; 0 before the first."""

    def __init__(self, kept: float = 0.9995) -> None:
        self._kept = kept
        self._tokens = self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self._tokens = self._kept * self._tokens + tokens
        self._seconds = self._kept * self._seconds + seconds

    @property
    def value(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0


class SecondsBySize:
    """Mean seconds by size, in powers of two: of all values at first, then of about the last 1 / RATE."""

    RATE = 0.1
    OUTLIER = 2.0

    def __init__(self, believed: float) -> None:
        self._believed = believed
        self._means: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def at(self, size: int) -> float:
        """Measured at the nearest size; else as believed."""
        if not self._means:
            return self._believed
        return self._means[min(self._means, key=lambda known: abs(known - size.bit_length()))]

    def observe(self, size: int, seconds: float) -> None:
        key = size.bit_length()
        self._counts[key] = self._counts.get(key, 0) + 1
        mean = self._means.get(key, seconds)
        seen = min(seconds, self.OUTLIER * mean)  # a draft that reads a new prompt says nothing of its levels
        self._means[key] = mean + max(self.RATE, 1 / self._counts[key]) * (seen - mean)
