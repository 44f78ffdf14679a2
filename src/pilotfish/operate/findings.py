from typing import Literal

from msgspec import Struct

from pilotfish.operate.intervals import Interval

NO_DIFFERENCE = "no difference seen"
NOT_ENOUGH = "not enough requests yet"


class MeasureWords(Struct, frozen=True):
    title: str
    unit: str
    kind: Literal["ratio", "count", "share"]  # what differences are: ratios, counts, points of a hundred
    more: str  # of a variant that has more of it
    less: str
    more_is_better: bool = True


WORDS = {
    "itl": MeasureWords("ITL", "ms", "ratio", "slower", "faster", more_is_better=False),
    "ttft": MeasureWords("TTFT", "ms", "ratio", "slower", "faster", more_is_better=False),
    "tokens_per_second": MeasureWords("tokens/s of a request", "", "ratio", "faster", "slower"),
    "tokens_per_step": MeasureWords("tokens per step", "", "count", "higher", "lower"),
    "valid": MeasureWords("valid structured outputs", "%", "share", "higher", "lower"),
    "score": MeasureWords("feedback", "%", "share", "higher", "lower"),
    "failed": MeasureWords("failed requests", "%", "share", "higher", "lower", more_is_better=False),
}
#: By which each unit is smaller than the one that values are kept in.
UNITS = {"ms": 1000.0, "%": 100.0, "": 1.0}


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
