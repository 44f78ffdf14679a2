"""Tests of bounded size over a figure that each reading measures once. The variance of its noise is a known *scale*,
such as 1 over the tokens of a mean, times a learned factor."""

from collections.abc import Sequence
from math import exp, log, sqrt

#: So many readings must agree, however far off: a garbage collector's pause is in one reading, or across two.
AGREEING = 3


class RunningMean:
    def __init__(self, memory: int) -> None:
        self.value = 0.0
        self.weight = 0  # the values that it is of
        self._memory = memory

    def observe(self, value: float) -> None:
        self.weight = min(self.weight + 1, self._memory)
        self.value += (value - self.value) / self.weight


class NoiseOfMeans:
    """The variance of means of `length` successive readings, times `length`: a reading's own variance if readings are
    independent, more if deviations last, as those of an unusual request do."""

    MEMORY = 600  # readings
    PRIOR = 4  # means that a belief counts for
    OUTLIER = 9.0  # variances: the most that a square counts for, so that outliers do not hide what follows them

    def __init__(self, length: int) -> None:
        self._length = length
        self._squares = RunningMean(self.MEMORY // length)
        self._sum, self._count = 0.0, 0

    def variance(self, belief: float) -> float:
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
    """A figure's noise, from deviations from its recent mean. Means of more readings are believed to have the noise of
    means of fewer, until theirs is known to be larger."""

    MEMORY = 30  # readings of the recent mean
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
    """An e-detector (Shin, Ramdas and Rinaldo 2022) of a rise of unknown size and time: the mean of Shiryaev-Roberts
    statistics for a few sizes s; s, and z, a reading's excess over the tolerance, in standard deviations of noise:

        R_s ← (R_s + 1) exp(s z − s²/2)        evidence = mean over s of R_s        detected: evidence ≥ LIMIT

    A rise of s is found after about 2 log(LIMIT) / s² readings, so its z uses the noise of means of about as many.
    Without a rise (z is symmetric about 0 or less, and its noise is known) the factor's mean is at most 1: evidence
    grows by at most 1 a reading, and a false alarm comes after LIMIT readings or more, on average."""

    LIMIT = 86_400.0  # readings: a day of seconds
    SIZES = (3.0, 2.0, 1.0, 0.5)  # standard deviations, for the LENGTHS of the noise
    #: z counts up to so many standard deviations, either way: the most that a reading adds to the logarithm of the
    #: evidence is then CLIP²/2, and AGREEING of these reach the limit, one fewer do not.
    CLIP = 3.25

    def __init__(self) -> None:
        self._statistics = [0.0] * len(self.SIZES)

    @property
    def evidence(self) -> float:
        return sum(self._statistics) / len(self.SIZES)

    @property
    def is_detected(self) -> bool:
        return self.evidence >= self.LIMIT

    def observe(self, excess: float, variances: Sequence[float]) -> None:
        """`excess`: above the tolerance; `variances`: of its noise, by length."""
        readings = zip(self._statistics, self.SIZES, variances, strict=True)
        self._statistics = [self._grown(r, s, excess / sqrt(variance)) for r, s, variance in readings]

    def _grown(self, statistic: float, size: float, deviation: float) -> float:
        z = max(-self.CLIP, min(self.CLIP, deviation))
        grown = (statistic + 1) * exp(size * z - size * size / 2)
        return min(grown, self.LIMIT * len(self.SIZES))  # more than enough would only take longer to fall


class SequentialTest:
    """Whether a mean is `centre` + `half` or `centre` − `half`: Wald's test (1945) for Gaussian noise, with odds of 20
    to 1. A reading counts for at most a third of these."""

    ODDS = 20.0

    def __init__(self, centre: float, half: float) -> None:
        self._centre, self._half = centre, half
        self._log_odds = 0.0

    @property
    def is_above(self) -> bool | None:
        """None: not yet decided."""
        return self._log_odds > 0 if abs(self._log_odds) >= log(self.ODDS) else None

    def observe(self, value: float, variance: float) -> None:
        most = log(self.ODDS) / AGREEING
        step = 2 * self._half * (value - self._centre) / variance
        self._log_odds += max(-most, min(most, step))
