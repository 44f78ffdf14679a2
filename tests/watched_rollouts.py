"""Rollouts that are watched after every request, many at a time: what `rollout.contrast` would say at each look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pilotfish.operate.intervals import MINIMUM, radius

Floats = NDArray[np.float64]
#: Elements of an array that are computed at a time.
BATCH = 1 << 20


def latencies(random: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Logarithms of latencies: lognormal, and of every fiftieth request a stall of a Pareto tail."""
    usual = np.log(0.02) + 0.35 * random.standard_normal(shape)
    return usual + (random.random(shape) < 0.02) * (1.5 + random.exponential(0.8, shape))


@dataclass(frozen=True)
class Traffic:
    """Requests of the variant and the holdout: `periods` of `requests` each. `share` of them are the variant's, by the
    time from 0 to 1; `load` is what the time adds to each request's logarithm, `effect` what the variant adds."""

    periods: int
    requests: int
    share: Callable[[Floats], Floats]
    load: Callable[[Floats], Floats] = np.zeros_like
    effect: float = 0.0
    draw: Callable[[np.random.Generator, tuple[int, ...]], Floats] = latencies

    def make(self, random: np.random.Generator, trials: int) -> Watched:
        shape = (trials, self.periods, self.requests)
        time = np.linspace(0, 1, self.periods * self.requests).reshape(shape[1:])
        in_variant = random.random(shape) < self.share(time)
        return Watched(self.draw(random, shape) + self.load(time) + self.effect * in_variant, in_variant)


def constant(share: float) -> Callable[[Floats], Floats]:
    return lambda time: np.full_like(time, share)


@dataclass(frozen=True)
class _Arm:
    """[trials, periods, requests]: of a period's requests so far."""

    count: Floats
    mean: Floats
    squares: Floats

    @classmethod
    def of(cls, values: Floats, mask: NDArray[np.bool_]) -> _Arm:
        count, total, squares = ((mask * power).cumsum(-1) for power in (1.0, values, values**2))
        mean = total / np.maximum(count, 1)
        return cls(count, mean, np.maximum(squares - total * mean, 0))


@dataclass(frozen=True)
class Looks:
    """[trials, looks]."""

    difference: Floats
    error: Floats  # of it: standard errors
    radius: Floats  # infinite where nothing is told

    @property
    def seen(self) -> NDArray[np.bool_]:
        return np.abs(self.difference) > self.radius

    @property
    def first(self) -> Floats:
        """[trials] requests until a difference was seen; infinite where none ever was."""
        return np.where(self.seen.any(1), self.seen.argmax(1) + 1.0, np.inf)


@dataclass(frozen=True)
class Watched:
    """[trials, periods, requests] of values, and whether each is the variant's."""

    values: Floats
    in_variant: NDArray[np.bool_]

    def looks(self, alpha: float) -> Looks:
        arms = [_Arm.of(self.values, mask) for mask in (self.in_variant, ~self.in_variant)]
        variant, holdout = arms
        weight = variant.count * holdout.count / (variant.count + holdout.count)
        weights = _running(weight)
        degrees, squares, noises = zip(*(_part(arm, weight) for arm in arms), strict=True)
        enough = np.minimum(*degrees) >= MINIMUM
        least = sum(squares) / np.maximum(sum(degrees), 1)
        variances = [np.maximum(s / np.maximum(d, 1), least) for s, d in zip(squares, degrees, strict=True)]
        noise = np.where(enough, sum(v * n for v, n in zip(variances, noises, strict=True)), 1)
        size = np.where(enough, 4 * noise / np.where(enough, sum(variances), 1), 1)
        weights = np.where(enough, weights, 1)
        difference = _running(weight * (variant.mean - holdout.mean)) / weights
        variance = noise / weights**2
        return Looks(difference, variance**0.5, np.where(enough, radius(variance, size, alpha), np.inf))


def _part(arm: _Arm, weight: Floats) -> tuple[Floats, Floats, Floats]:
    """Degrees of freedom, squares and noise of an arm in the periods that both arms have."""
    both, count = weight > 0, np.maximum(arm.count, 1)
    return _running(both * (count - 1)), _running(both * arm.squares), _running(weight**2 / count)


def _running(of_period: Floats) -> Floats:
    """[trials, looks]: the period so far, and all of those before."""
    ends = of_period[..., -1].cumsum(-1) - of_period[..., -1]
    return (of_period + ends[..., None]).reshape(len(of_period), -1)


def first_seen(traffic: Traffic, trials: int, alpha: float, seed: int) -> Floats:
    """[trials] requests of both arms until a difference was seen; infinite where none ever was."""
    random = np.random.default_rng(seed)
    at_a_time = max(BATCH // (traffic.periods * traffic.requests), 1)
    sizes = [min(at_a_time, trials - done) for done in range(0, trials, at_a_time)]
    return np.concatenate([traffic.make(random, size).looks(alpha).first for size in sizes])
