"""Evidence, reading by reading, that a figure has changed for the worse, or which of two claims about it holds.

All of it is of bounded size. A figure is measured once a reading. The variance of its noise is a *scale* that is known,
such as one over the tokens that a mean is taken of, times a factor that is learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt

#: No single reading decides anything: it takes this many that agree, however far off they are. A pause of a garbage
#: collector is in one, or across two.
AGREEING = 3


class RunningMean:
    """Of all values at first, later of about the last `memory` of them."""

    def __init__(self, memory: int) -> None:
        self.value = 0.0
        self.weight = 0  # the values that it is of
        self._memory = memory

    def observe(self, value: float) -> None:
        self.weight = min(self.weight + 1, self._memory)
        self.value += (value - self.value) / self.weight


class NoiseOfMeans:
    """The variance of means of `length` successive readings, times `length`: a reading's own variance if readings do
    not depend on each other, more if what is off stays off, as a request that is unlike others is while it runs."""

    MEMORY = 600  # readings
    PRIOR = 4  # means that a belief counts for
    OUTLIER = 9.0  # variances: the most that a square counts for, so that outliers do not hide what follows them

    def __init__(self, length: int) -> None:
        self._length = length
        self._squares = RunningMean(self.MEMORY // length)
        self._sum, self._count = 0.0, 0

    def variance(self, belief: float) -> float:
        """With what was believed before there were readings."""
        count = self._squares.weight
        return (self.PRIOR * belief + count * self._squares.value) / (self.PRIOR + count)

    def observe(self, deviation: float, belief: float) -> None:
        self._sum += deviation
        self._count += 1
        if self._count == self._length:
            square = self._sum**2 / self._length
            self._squares.observe(min(square, self.OUTLIER * self.variance(belief)))
            self._sum, self._count = 0.0, 0


class NoiseEstimate:
    """A figure's noise, from its deviations from its own mean lately. Means of more readings are believed to
    have the noise that means of fewer show, until they have shown that theirs is more."""

    MEMORY = 30  # readings: of what the figure was lately
    LENGTHS = (3, 6, 12, 24)
    FIRST_BELIEF = 1.0  # tokens' times vary about as much as their mean; some of it stays, so that no noise is 0
    OUTLIER = 5.0  # standard deviations: what is further off counts as if it were so far

    def __init__(self) -> None:
        #: By length, of a reading of scale 1.
        self.variances = [self.FIRST_BELIEF] * len(self.LENGTHS)
        self._lately = RunningMean(self.MEMORY)
        self._means = [NoiseOfMeans(length) for length in self.LENGTHS]

    def observe(self, value: float, scale: float) -> None:
        if self._lately.weight:
            most = self.OUTLIER * sqrt(self.variances[0] * scale)
            deviation = max(-most, min(most, value - self._lately.value))
            self.variances = self._learned(deviation / sqrt(scale))
            value = self._lately.value + deviation
        self._lately.observe(value)

    def _learned(self, deviation: float) -> list[float]:
        found: list[float] = []
        for noise in self._means:
            belief = found[-1] if found else self.FIRST_BELIEF
            noise.observe(deviation, belief)
            found.append(max([noise.variance(belief), *found[-1:]]))
        return found


class ChangeDetector:
    """Finds a rise whose size and time are unknown. It is an e-detector (Shin, Ramdas and Rinaldo 2022): the mean of
    the statistics of Shiryaev and Roberts for a few sizes. With z, by how many standard deviations of its noise a
    reading is above what is tolerated, and a rise of s of them,

        R_s ← (R_s + 1) exp(s z − s²/2)        evidence = mean over s of R_s        detected: evidence ≥ LIMIT

    A rise of s is found after about 2 log(LIMIT) / s² readings, so its z is by the noise in means of about as many.
    While nothing is wrong (z is symmetric about 0 or less, and its noise is known) the factor is 1 on average or less.
    Then evidence grows by 1 a reading on average at most, and a false alarm comes after LIMIT readings on average or
    more.
    """

    LIMIT = 86_400.0  # readings: a day of seconds
    SIZES = (3.0, 2.0, 1.0, 0.5)  # standard deviations, for the LENGTHS of the noise
    #: z counts up to so many standard deviations, either way: the most that a reading adds to the logarithm of the
    #: evidence is then CLIP²/2, and AGREEING of these reach the limit, one fewer do not.
    CLIP = 3.25

    def __init__(self) -> None:
        self._statistics = [0.0] * len(self.SIZES)

    @property
    def evidence(self) -> float:
        """Below 1 there is none."""
        return sum(self._statistics) / len(self.SIZES)

    @property
    def is_detected(self) -> bool:
        return self.evidence >= self.LIMIT

    def observe(self, excess: float, variances: Sequence[float]) -> None:
        """A reading is by `excess` above what is tolerated, with noise of these variances, by length."""
        readings = zip(self._statistics, self.SIZES, variances, strict=True)
        self._statistics = [self._grown(r, s, excess / sqrt(variance)) for r, s, variance in readings]

    def _grown(self, statistic: float, size: float, deviation: float) -> float:
        z = max(-self.CLIP, min(self.CLIP, deviation))
        grown = (statistic + 1) * exp(size * z - size * size / 2)
        return min(grown, self.LIMIT * len(self.SIZES))  # more than enough would only take longer to fall


class SequentialTest:
    """Whether a mean is `centre` + `half` or `centre` − `half`: Wald's test (1945) for Gaussian noise, with odds of 20
    to 1 either way. A reading counts for a third of these at most."""

    ODDS = 20.0

    def __init__(self, centre: float, half: float) -> None:
        self._centre, self._half = centre, half
        self._log_odds = 0.0

    @property
    def is_above(self) -> bool:
        return self._log_odds >= log(self.ODDS)

    @property
    def is_below(self) -> bool:
        return self._log_odds <= -log(self.ODDS)

    def observe(self, value: float, variance: float) -> None:
        most = log(self.ODDS) / AGREEING
        step = 2 * self._half * (value - self._centre) / variance
        self._log_odds += max(-most, min(most, step))
