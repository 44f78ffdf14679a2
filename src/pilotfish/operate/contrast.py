"""Running sums of bounded size, exact however split and merged. Differences of variant and holdout are taken hour by
hour and averaged: over all hours at once, a variant whose share rises would meet another load than the holdout."""

from typing import Annotated

from msgspec import Meta, Struct, field

from pilotfish.operate.intervals import MINIMUM, Interval, around

#: Seconds over which the load counts as constant.
PERIOD = 3600

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(ge=0)]


class Moments(Struct):
    count: Count = 0
    mean: float = 0.0
    squares: Positive = 0.0

    def add(self, value: float) -> None:
        """Welford, "Note on a method for calculating corrected sums of squares and products", 1962."""
        self.count += 1
        deviation = value - self.mean
        self.mean += deviation / self.count
        self.squares += deviation * (value - self.mean)

    def merge(self, other: "Moments") -> None:
        """Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979."""
        if not other.count:
            return
        count, deviation = self.count + other.count, other.mean - self.mean
        self.squares += other.squares + deviation**2 * self.count * other.count / count
        self.mean += deviation * other.count / count
        self.count = count

    @property
    def variance(self) -> float:
        return self.squares / (self.count - 1) if self.count > 1 else 0.0


class ArmPart(Struct):
    """The part of an arm in a difference over periods."""

    count: Count = 0
    degrees: Count = 0  # of freedom: observations but for the first of each period
    squares: Positive = 0.0  # of deviations from the mean of their period
    noise: Positive = 0.0  # over periods: weight² / observations

    def add(self, moments: Moments, weight: float) -> None:
        self.merge(ArmPart(moments.count, moments.count - 1, moments.squares, weight**2 / moments.count))

    def merge(self, other: "ArmPart") -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class PeriodSums(Struct):
    """Periods in which both arms had requests. One weighs as much as it tells where variances are equal:
    n m / (n + m), of n and m observations (Cochran's weights)."""

    weight: Positive = 0.0
    weighted: float = 0.0  # weight times difference of means
    variant: ArmPart = field(default_factory=ArmPart)
    holdout: ArmPart = field(default_factory=ArmPart)

    def add(self, variant: Moments, holdout: Moments) -> None:
        if variant.count and holdout.count:
            weight = variant.count * holdout.count / (variant.count + holdout.count)
            self.weight += weight
            self.weighted += weight * (variant.mean - holdout.mean)
            self.variant.add(variant, weight)
            self.holdout.add(holdout, weight)

    def merge(self, other: "PeriodSums") -> None:
        self.weight += other.weight
        self.weighted += other.weighted
        self.variant.merge(other.variant)
        self.holdout.merge(other.holdout)

    def interval(self, alpha: float) -> Interval | None:
        """Of the variant's mean minus the holdout's in the same period; None: too few observations. The weighted sum
        less its mean is a martingale with the variance of `noise`; the mixture's boundary holds at any weights, so
        shares of arms may differ and change."""
        if not self.weight or min(self.variant.degrees, self.holdout.degrees) < MINIMUM:
            return None
        # a small arm often lacks rare events, and would seem to vary less than both together
        least = (self.deviation or 0.0) ** 2
        variant, holdout = (max(part.squares / part.degrees, least) for part in (self.variant, self.holdout))
        noise = variant * self.variant.noise + holdout * self.holdout.noise
        size = noise / ((variant + holdout) / 2) * 2 if noise else 0.0
        return around(self.weighted / self.weight, noise / self.weight**2, size, alpha)

    @property
    def deviation(self) -> float | None:
        """Standard deviation of one observation of either arm; None: unknown."""
        degrees = self.variant.degrees + self.holdout.degrees
        return ((self.variant.squares + self.holdout.squares) / degrees) ** 0.5 if degrees else None


class Contrast(Struct):
    """One measure of a variant beside the holdout: past periods, and the present one."""

    period: int = 0
    variant: Moments = field(default_factory=Moments)
    holdout: Moments = field(default_factory=Moments)
    past: PeriodSums = field(default_factory=PeriodSums)

    def add(self, time: float, value: float, *, of_holdout: bool = False) -> None:
        """`time` in seconds since the epoch; an earlier one counts in the present period."""
        if (period := int(time // PERIOD)) > self.period:
            self.past.add(self.variant, self.holdout)
            self.period, self.variant, self.holdout = period, Moments(), Moments()
        (self.holdout if of_holdout else self.variant).add(value)

    def total(self) -> PeriodSums:
        sums = PeriodSums()
        sums.merge(self.past)
        sums.add(self.variant, self.holdout)
        return sums

    def merge(self, other: "Contrast") -> None:
        """Periods of different servers stay apart: each has its own load."""
        self.past.merge(other.total())
