"""The plots of a result: each with what to take from it in a sentence, and its numbers as a table. Off is in all."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.etree.ElementTree import Element

from pilotfish.cli.pages.charts import Axis, Series, bar_chart, cdf, line_chart, percentile
from pilotfish.cli.pages.saved_result import OFF, MeasuredSetting, RequestTimes, SavedResult

#: Settings that are drawn beside off; tables have all.
DRAWN = 5
#: Of the values of a distribution, what the axis reaches to.
SHOWN_SHARE = 0.99
PERCENTILES = (0.5, 0.9, 0.95, 0.99)
SPEEDS = ("tokens/s", "tokens a verify step", "nodes", "hits", "equal to off", "overruns")


@dataclass(frozen=True)
class Plot:
    title: str
    takeaway: str
    charts: list[Element]
    columns: list[str]
    rows: list[list[str]]
    note: str = ""  # above the numbers
    wide: bool = False  # as wide as the page


@dataclass(frozen=True)
class Drawn:
    """A result and the settings that are drawn of it, with the class of each. Off is the first where there is one."""

    result: SavedResult
    styles: dict[str, str]

    @classmethod
    def of(cls, result: SavedResult) -> Drawn:
        best = {
            name: max((one.speed for one in result.settings if one.setting == name), default=0.0)
            for name in result.names
        }
        others = sorted((name for name in result.names if name != OFF), key=lambda name: -best[name])[:DRAWN]
        chosen = [name for name in result.names if name == OFF or name in others]
        plain = OFF not in chosen
        return cls(result, {name: f"s{place + plain}" for place, name in enumerate(chosen)})

    def rows(self, name: str) -> list[MeasuredSetting]:
        return sorted((one for one in self.result.settings if one.setting == name), key=lambda one: one.load)

    def requests(self, name: str, load: float) -> list[RequestTimes]:
        """Those that gave tokens."""
        found = (one for one in self.result.requests if one.setting == name and one.load == load)
        return [one for one in found if one.times and not one.error]

    @property
    def load_label(self) -> str:
        by_rate = any(one.rate for one in self.result.measured)
        return "requests a second" if by_rate else "requests at a time"

    def at(self, load: float) -> str:
        return f"{load:g} {'requests a second' if 'second' in self.load_label else 'at a time'}"


# -- speed


def speedups(drawn: Drawn) -> list[Plot]:
    return [plot for plot in (_speedup(drawn), _throughput(drawn)) if plot is not None]


def _speedup(drawn: Drawn) -> Plot | None:
    ratios = {
        name: [(one.load, one.over_off) for one in drawn.rows(name) if one.over_off is not None]
        for name in drawn.result.names
    }
    medians = {name: [(load, ratio["median"]) for load, ratio in found] for name, found in ratios.items() if found}
    shown = [name for name in drawn.styles if name in medians]
    if OFF not in medians:
        return None
    highest = max(ratio["upper"] for name in shown for _, ratio in ratios[name])
    series = [
        Series(name, drawn.styles[name], medians[name], [(r["lower"], r["upper"]) for _, r in ratios[name]])
        for name in shown
    ]
    rings = [(at, 1.0) for name in shown if name != OFF and (at := crossover(medians[name])) is not None]
    axis = Axis.up_to("speed-up over off (×)", max(highest, 1.2))
    rows = [
        [name, f"{load:g}", f"{r['median']:.2f}", f"{r['lower']:.2f} – {r['upper']:.2f}", crossing]
        for name in medians
        for crossing in ["1 by definition" if name == OFF else crossover_text(medians[name])]
        for load, r in ratios[name]
    ]
    chart = _by_load("Speed-up over off by load; off is 1", drawn, axis, series, rings)
    note = "Medians over rounds of the ratio to off in the same round; strokes and the column beside are quartiles;"
    note += " rings are where speculation stops paying."
    columns = ["setting", drawn.load_label, "speed-up", "quartiles", "crossover"]
    return Plot("Speed-up against load", _speedup_takeaway(drawn, medians), [chart], columns, rows, note)


def _by_load(
    title: str, drawn: Drawn, axis: Axis, series: Sequence[Series], rings: Sequence[tuple[float, float]] = ()
) -> Element:
    loads = drawn.result.loads
    if len(loads) > 1:
        return line_chart(title, Axis.doubling(drawn.load_label, loads), axis, series, rings)
    return bar_chart(title, axis, [drawn.at(loads[0])], [(one.name, one.style, [one.points[0][1]]) for one in series])


def _speedup_takeaway(drawn: Drawn, medians: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    others = {name: points for name, points in medians.items() if name != OFF}
    if not others:
        return "Only off was measured: there is nothing to compare it with."
    best = max(others, key=lambda name: max(ratio for _, ratio in others[name]))
    load, ratio = max(others[best], key=lambda point: point[1])
    if ratio < 1:
        return f"Speculation does not pay here: the best setting, {best}, makes {ratio:.2f} tokens while off makes one."
    return (
        f"{best} makes {ratio:.2f} tokens while off makes one, at {drawn.at(load)}; it {crossover_text(others[best])}."
    )


def _throughput(drawn: Drawn) -> Plot | None:
    if not drawn.result.settings:
        return None
    points = {name: [(one.load, one.speed) for one in drawn.rows(name)] for name in drawn.result.names}
    series = [Series(name, style, points[name]) for name, style in drawn.styles.items() if points[name]]
    highest = max(speed for found in points.values() for _, speed in found)
    axis = Axis.up_to("tokens a second, all together", highest)
    columns = ["setting", drawn.load_label, *SPEEDS]
    rows = [_speed_row(one) for name in drawn.result.names for one in drawn.rows(name)]
    fastest = max((one for one in drawn.result.settings), key=lambda one: one.speed)
    takeaway = f"The most is {fastest.speed:.0f} tokens a second, by {fastest.setting} at {drawn.at(fastest.load)}."
    return Plot("Throughput", takeaway, [_by_load("Tokens a second by load", drawn, axis, series)], columns, rows)


def _speed_row(one: MeasuredSetting) -> list[str]:
    shares = (one.hit_share, one.equal_outputs, one.overruns)
    counts = (one.tokens_per_verify_step, one.nodes)
    return [
        one.setting,
        f"{one.load:g}",
        f"{one.speed:.1f}",
        *("" if count is None else f"{count:.2f}" for count in counts),
        *("" if share is None else f"{share:.1%}" for share in shares),
    ]


# -- latency


LATENCIES: dict[str, tuple[str, Callable[[RequestTimes], list[float]]]] = {
    "TTFT": ("time to the first token (ms)", lambda one: [] if one.first is None else [one.first - one.sent]),
    "ITL": ("time between arrivals of tokens (ms)", lambda one: one.gaps),
    "E2E": ("time of a whole request (ms)", lambda one: [one.ended - one.sent]),
}


def latencies(drawn: Drawn, load: float) -> Plot | None:
    found = {
        short: {
            name: [1000 * t for one in drawn.requests(name, load) for t in times(one)] for name in drawn.result.names
        }
        for short, (_, times) in LATENCIES.items()
    }
    found = {short: {name: values for name, values in of.items() if values} for short, of in found.items()}
    charts = [_distribution(drawn, short, LATENCIES[short][0], values) for short, values in found.items() if values]
    if not charts:
        return None
    rows = [
        [name, short, *(f"{percentile(values, share):.1f}" for share in PERCENTILES), str(len(values))]
        for short, by_name in found.items()
        for name, values in by_name.items()
    ]
    columns = ["setting", "", *(f"p{share:.0%}".rstrip("%") for share in PERCENTILES), "count"]
    note = "Milliseconds. Tokens of one verify step come together; ITL is between the moments at which some come."
    title = f"Latency at {drawn.at(load)}"
    return Plot(title, _latency_takeaway(found["E2E"]), charts, columns, rows, note, wide=True)


def _distribution(drawn: Drawn, short: str, label: str, values: Mapping[str, Sequence[float]]) -> Element:
    shown = {name: values[name] for name in drawn.styles if name in values}
    reach = max(percentile(found, SHOWN_SHARE) for found in shown.values())
    axes = Axis.up_to(label, reach), Axis("share of all", 0.0, 1.0, (0, 0.25, 0.5, 0.75, 1))
    series = [Series(name, drawn.styles[name], cdf(found), dots=False, stairs=True) for name, found in shown.items()]
    return line_chart(f"{short}: share of all within a time", *axes, series)


def _latency_takeaway(values: Mapping[str, Sequence[float]]) -> str:
    medians = {name: percentile(found, 0.5) for name, found in values.items()}
    best = min(medians, key=lambda name: medians[name])
    against = f" (off: {medians[OFF]:.0f} ms)" if OFF in medians and best != OFF else ""
    return f"Further left is quicker: half of all requests take at most {medians[best]:.0f} ms with {best}{against}."


# -- acceptance


def acceptance_by_depth(drawn: Drawn, load: float) -> Plot | None:
    """Of the trees that reached a depth, the share of which a guess was accepted there."""
    found = {one.setting: one.by_depth for one in drawn.result.acceptance if one.load == load and one.by_depth}
    deepest = max((len(one.offered) for one in found.values()), default=0)
    if not deepest:
        return None
    shares = {
        name: [(depth, a / o) for depth, (a, o) in enumerate(zip(one.accepted, one.offered, strict=True), 1) if o]
        for name, one in found.items()
    }
    shares |= {OFF: [(depth, 0.0) for depth in range(1, deepest + 1)]} if OFF in found else {}
    series = [Series(name, style, shares[name]) for name, style in drawn.styles.items() if shares.get(name)]
    ticks = range(1, deepest + 1, max(1, deepest // 8))
    axes = (
        Axis("depth in the tree", 0.7, deepest + 0.3, ticks),
        Axis("share accepted", 0.0, 1.0, (0, 0.25, 0.5, 0.75, 1)),
    )
    rows = [
        [name, str(depth), str(o), str(a), f"{a / o:.1%}" if o else ""]
        for name, one in found.items()
        for depth, (o, a) in enumerate(zip(one.offered, one.accepted, strict=True), 1)
    ]
    guessing = {name: points[0][1] for name, points in shares.items() if name != OFF and points}
    best = max(guessing, key=lambda name: guessing[name])
    takeaway = f"With {best} the target accepts a first guess in {guessing[best]:.0%} of the steps; off makes none."
    columns = ["setting", "depth", "trees that reached it", "accepted there", "share"]
    chart = line_chart("Share of guesses accepted by depth; off makes none", *axes, series)
    return Plot("Acceptance by depth", takeaway, [chart], columns, rows)


# -- where speculation stops paying


def crossover(points: Sequence[tuple[float, float]]) -> float | None:
    """The load at which a speed-up, of (load, speed-up) in order of loads, falls below 1: interpolated on the logarithm
    of the load, between the two measured ones of the first fall. None: it does not within the range."""
    for (load, above), (next_load, below) in pairwise(points):
        if above >= 1 > below:
            share = (above - 1) / (above - below)
            return math.exp(math.log(load) + share * math.log(next_load / load))
    return None


def crossover_text(points: Sequence[tuple[float, float]]) -> str:
    if (found := crossover(points)) is not None:
        return f"stops paying at about {found:.3g}"
    low, high = points[0][0], points[-1][0]
    where = f"at {low:g}" if low == high else f"from {low:g} to {high:g}"
    if all(speedup >= 1 for _, speedup in points):
        return f"pays {where}; the crossover is not within the range"
    if all(speedup < 1 for _, speedup in points):
        return f"does not pay {where}; the crossover is not within the range"
    return f"pays at {high:g}, but not at {low:g}; it does not stop paying within the range"
