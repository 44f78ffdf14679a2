"""Differences of times and speeds are ratios less 1: times of -0.1 are a tenth shorter."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from math import exp, expm1, log1p
from typing import Literal

from msgspec import Struct

from pilotfish.config.hardware.tables import read_table
from pilotfish.errors import ParameterError
from pilotfish.operate.arms import MEASURES, Arm, RolloutArms
from pilotfish.operate.contrast import Contrast, Moments
from pilotfish.operate.intervals import Interval, mean_interval, requests_needed, share_interval

#: The measure for which alpha holds over all variants together.
PRIMARY = "itl"
#: Differences of it for which the needed requests are given.
SOUGHT = (0.01, 0.05, 0.1)
NO_HOLDOUT = "no holdout to compare with"
NO_DIFFERENCE = "no difference seen"
NOT_ENOUGH = "not enough requests yet"
#: Logarithms beyond it are cut: no time or speed is so large.
GREATEST_LOG = 100.0


class MeasureWords(Struct, frozen=True):
    title: str
    unit: str
    kind: Literal["ratio", "count", "share"]  # what differences are: ratios, counts, points of a hundred
    more: str  # of a variant that has more of it
    less: str
    more_is_better: bool = True


WORDS = read_table(__file__, "measures", dict[str, MeasureWords])
#: By which each unit is smaller than the one that values are kept in.
UNITS = {"ms": 1000.0, "%": 100.0, "": 1.0}


class RolloutRow(Struct, frozen=True, kw_only=True):
    variant: str
    measure: str
    primary: bool
    observations: int
    value: Interval | None  # the mean; of times, in seconds, and of speeds the geometric mean
    difference: Interval | None  # to the holdout in the same hours; None of the holdout, and where too little is known
    better: bool | None  # None: no difference is seen
    finding: str  # the difference in words; "" of the holdout


class RequestNeed(Struct, frozen=True):
    variant: str
    difference: float  # of `PRIMARY`
    requests: int  # of the variant and the holdout together, that would show it


class VariantCounts(Struct, frozen=True):
    variant: str
    requests: int
    tokens: int
    cut: int
    pinned: int


class RolloutReport(Struct, frozen=True, kw_only=True):
    holdout: str
    since: float  # seconds since the epoch
    sticky: str
    alpha: float
    interval_alpha: float  # of each interval: a part of alpha for each variant
    left_out: int
    variants: list[VariantCounts]
    rows: list[RolloutRow]
    needs: list[RequestNeed]


def rollout_report(arms: RolloutArms, alpha: float) -> RolloutReport:
    """The primary measure of any variant is falsely said to differ with a chance of at most `alpha`, however often
    reports are made. Each other measure has that chance by itself. ParameterError where `alpha` is no chance."""
    if not 0 < alpha < 1:
        raise ParameterError("alpha", alpha, "a number between 0 and 1")
    each = alpha / max(len(arms.compared), 1)
    return RolloutReport(
        holdout=arms.holdout,
        since=arms.since,
        sticky=arms.sticky,
        alpha=alpha,
        interval_alpha=each,
        left_out=arms.left_out,
        variants=[VariantCounts(n, a.requests, a.tokens, a.cut, a.pinned) for n, a in arms.arms.items()],
        rows=[_row(arms, name, measure, each) for measure in MEASURES for name in arms.arms],
        needs=[need for name in arms.compared for need in _needs(name, arms.arms[name], each)],
    )


def _row(arms: RolloutArms, name: str, measure: str, alpha: float) -> RolloutRow:
    arm, beside = arms.arms[name], name != arms.holdout
    moments = arm.moments.get(measure, Moments())
    between = arm.contrasts.get(measure, Contrast()).total().interval(alpha) if beside else None
    difference = _mapped(between, expm1) if WORDS[measure].kind == "ratio" else between
    seen = difference is not None and not difference.holds(0)
    return RolloutRow(
        variant=name,
        measure=measure,
        primary=measure == PRIMARY,
        observations=moments.count,
        value=_value(measure, moments, alpha),
        difference=difference,
        better=(difference.estimate > 0) == WORDS[measure].more_is_better if difference and seen else None,
        finding=(finding(measure, difference) if arms.holdout else NO_HOLDOUT) if beside else "",
    )


def _value(measure: str, moments: Moments, alpha: float) -> Interval | None:
    if WORDS[measure].kind == "share":
        return share_interval(moments.count, moments.mean * moments.count, alpha)
    mean = mean_interval(moments.count, moments.mean, moments.variance, alpha)
    return _mapped(mean, exp) if WORDS[measure].kind == "ratio" else mean


def _mapped(interval: Interval | None, function: Callable[[float], float]) -> Interval | None:
    if interval is None:
        return None
    ends = (interval.estimate, interval.low, interval.high)
    return Interval(*(function(min(end, GREATEST_LOG)) for end in ends))


def _needs(name: str, arm: Arm, alpha: float) -> Iterator[RequestNeed]:
    sums = arm.contrasts.get(PRIMARY, Contrast()).total()
    if sums.deviation and min(sums.variant.count, sums.holdout.count):
        share = sums.variant.count / (sums.variant.count + sums.holdout.count)
        for sought in SOUGHT:
            yield RequestNeed(name, sought, requests_needed(log1p(sought), sums.deviation, share, alpha))


def finding(measure: str, difference: Interval | None) -> str:
    if difference is None:
        return NOT_ENOUGH
    if difference.holds(0):
        return NO_DIFFERENCE
    words = WORDS[measure]
    scale = 1 if words.kind == "count" else 100
    size, *ends = (figure(scale * abs(at)) for at in (difference.estimate, difference.low, difference.high))
    low, high = ends if difference.estimate > 0 else reversed(ends)
    unit, per = {"ratio": (" %", " %"), "share": (" points", ""), "count": ("", "")}[words.kind]
    return f"{words.more if difference.estimate > 0 else words.less} by {size}{unit} ({low}{per} to {high}{per})"


def value_text(measure: str, value: Interval | None) -> str:
    if value is None:
        return ""
    unit = WORDS[measure].unit
    mean, low, high = (figure(UNITS[unit] * end, 3) for end in (value.estimate, value.low, value.high))
    return f"{mean} {unit}".rstrip() + f" ({low} to {high})"


def figure(value: float, digits: int = 2) -> str:
    return f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) - 0.05 else f"{value:.{digits}g}"


def about(count: int) -> str:
    return f"{float(f'{count:.2g}'):,.0f}"


def summary(report: RolloutReport) -> list[str]:
    since = datetime.fromtimestamp(report.since, UTC).isoformat(" ", "seconds")
    beside = f"the holdout is {report.holdout}" if report.holdout else "there is no holdout: nothing is compared"
    level = f"alpha {report.alpha:g}, {report.interval_alpha:.3g} of each interval"
    counts = [f"{one.variant}: {one.requests} requests, {one.tokens} tokens{_apart(one)}" for one in report.variants]
    left_out = [f"{report.left_out} requests of further variants are left out"] if report.left_out else []
    return [f"Since {since}; {beside}; {level}", *counts, *left_out]


def notes(report: RolloutReport) -> list[str]:
    lines = [
        f"The chance that {WORDS[PRIMARY].title} of any variant is ever said to differ where it does not is "
        f"{report.alpha:g} at most, however often one looks. Secondary measures have that chance each."
    ]
    if report.sticky == "client":
        lines.append(
            "Variants stick to clients, whose requests resemble each other: intervals are too narrow where clients "
            "are few."
        )
    return lines + [_need_line(report, name) for name in dict.fromkeys(need.variant for need in report.needs)]


def _apart(counts: VariantCounts) -> str:
    told = {"cut": counts.cut, "pinned": counts.pinned}
    return "".join(f"; {count} {name}, not compared" for name, count in told.items() if count)


def _need_line(report: RolloutReport, variant: str) -> str:
    needs = [need for need in report.needs if need.variant == variant]
    found = ", ".join(f"{100 * need.difference:g} %: about {about(need.requests)}" for need in needs)
    return f"Requests of {variant} and the holdout that show a difference of {WORDS[PRIMARY].title} of {found}"
