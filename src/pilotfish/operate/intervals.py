"""Intervals that hold at all times at once: whoever looks and stops at will is wrong no more often than alpha.

- Of means, and of differences of means: asymptotic confidence sequences with the Gaussian mixture's boundary
  (Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas, "Time-uniform central limit theory and asymptotic confidence
  sequences", Annals of Statistics 2024, theorem 2.2). They hold as a central limit theorem does, which is why `MINIMUM`
  observations come first.
- Of means of values from 0 to 1: the mixture of all alternatives by Beta(1/2, 1/2) (Robbins, "Statistical methods
  related to the law of the iterated logarithm", 1970), which holds exactly from the first observation on.
"""

from bisect import bisect_left
from math import ceil, inf, lgamma, log, log1p

import numpy as np
from msgspec import Struct
from numpy.typing import ArrayLike, NDArray

#: Observations of an arm before an interval is given.
MINIMUM = 100
#: The size at which an interval is as narrow as this boundary allows; elsewhere it is a little wider.
TUNED_FOR = 1000
#: The chance that a difference is seen after the stated requests.
POWER = 0.9
#: The quantile of a normal distribution at `POWER`.
POWER_QUANTILE = 1.2816
#: The search for a need of requests ends here.
MOST_NEEDED = 10**12


class Interval(Struct, frozen=True):
    estimate: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


def radius(variance: ArrayLike, size: ArrayLike, alpha: float) -> NDArray[np.float64]:
    """Half the width of the interval around an estimate with this variance after `size` observations. For a mean, the
    variance is that of one observation over their number."""
    scaled = np.asarray(size) * _mixing(alpha) / TUNED_FOR
    factor = (1 + 1 / scaled) * (np.log1p(scaled) - 2 * log(alpha))
    return np.sqrt(np.asarray(variance) * factor)


def _mixing(alpha: float) -> float:
    """rho² times the size where the boundary is narrowest: the root of x = log(1 + x) - 2 log(alpha)."""
    x = -2 * log(alpha)
    for _ in range(30):  # each turn leaves a 1 / (1 + x) of the error
        x = log1p(x) - 2 * log(alpha)
    return x


def around(estimate: float, variance: float, size: float, alpha: float) -> Interval:
    half = float(radius(variance, size, alpha)) if variance > 0 else 0.0
    return Interval(estimate, estimate - half, estimate + half)


def mean_interval(count: int, mean: float, variance: float, alpha: float) -> Interval | None:
    """Of the mean of `count` independent observations; None: too few."""
    return around(mean, variance / count, count, alpha) if count >= MINIMUM else None


def share_interval(count: int, total: float, alpha: float) -> Interval | None:
    """Of the mean of `count` values from 0 to 1 whose sum is `total`; None without values. The bet on a mean p, the
    mixture of ∏ (q/p)^x ((1-q)/(1-p))^(1-x) over q, starts at 1 and never grows in expectation if p is right: each
    factor is convex in x, and 1 in expectation where x is 0 or 1. So it reaches 1 / alpha with a chance of at most
    alpha (Ville)."""
    if count == 0:
        return None
    share = min(max(total / count, 0.0), 1.0)
    edges = (_edge(count, share, outside, -log(alpha)) for outside in (0.0, 1.0))
    return Interval(share, *edges)


def _edge(count: int, share: float, outside: float, limit: float) -> float:
    """The mean between `share` and `outside` from which on the bet exceeds exp(limit), or `outside`."""
    inside = share
    for _ in range(60):
        middle = (inside + outside) / 2
        if _log_worth(count, share, middle) <= limit:
            inside = middle
        else:
            outside = middle
    return inside


def _log_worth(count: int, share: float, p: float) -> float:
    ones, zeros = count * share, count * (1 - share)
    against = _log_power(ones, p) + _log_power(zeros, 1 - p)
    return _log_beta(ones + 0.5, zeros + 0.5) - _log_beta(0.5, 0.5) - against


def _log_power(exponent: float, base: float) -> float:
    if exponent == 0:
        return 0.0
    return exponent * log(base) if base > 0 else -inf


def _log_beta(a: float, b: float) -> float:
    return lgamma(a) + lgamma(b) - lgamma(a + b)


def requests_needed(difference: float, deviation: float, share: float, alpha: float) -> int:
    """Requests of two arms together, one with this share, that show a difference of means with a chance of at least
    `POWER`. Earlier looks, which may show it too, are not counted. `MOST_NEEDED` at most."""

    def seen(size: int) -> bool:
        variance = 2 * deviation**2 / size
        return bool(radius(variance, size, alpha) + POWER_QUANTILE * variance**0.5 <= difference)

    size = bisect_left(range(MOST_NEEDED), True, lo=1, key=seen)  # of each of two equal arms
    return ceil(max(size / (2 * share * (1 - share)), MINIMUM / min(share, 1 - share)))
