"""The plots of a result's acceptance: by depth, by position in the output, by category of the prompt."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from pilotfish.bench.charts import Axis, Series, bar_chart, line_chart
from pilotfish.bench.plots import Drawn, Plot
from pilotfish.bench.saved import OFF, RequestTimes

#: Output positions that are one point.
POSITIONS = 16
#: Of a plot by position: the fewest steps that make a point.
FEWEST = 5


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


def acceptance_by_position(drawn: Drawn, load: float) -> Plot | None:
    """Tokens that come at a time, by how far the output is."""
    found = {name: _by_position(drawn.requests(name, load)) for name in drawn.result.names}
    series = [Series(name, style, found[name]) for name, style in drawn.styles.items() if found[name]]
    if not series:
        return None
    furthest = max(at for one in series for at, _ in one.points)
    highest = max(mean for one in series for _, mean in one.points)
    axes = Axis.up_to("token of the output", furthest), Axis.up_to("tokens at a time", max(highest, 2.0))
    rows = [[name, f"{at:.0f}", f"{mean:.2f}"] for name, points in found.items() for at, mean in points]
    chart = line_chart("Tokens that come at a time by position in the output; off is 1", *axes, series)
    columns = ["setting", f"middle of {POSITIONS} tokens", "tokens at a time"]
    return Plot("Acceptance by position", _position_takeaway(found), [chart], columns, rows)


def _by_position(requests: Sequence[RequestTimes]) -> list[tuple[float, float]]:
    """Means over the steps that began among so many tokens; the first token of an output is its prompt's."""
    bins: dict[int, list[int]] = {}
    for one in requests:
        position = 0
        for _, count in one.arrivals:
            if position:
                bins.setdefault(position // POSITIONS, []).append(count)
            position += count
    return [
        ((place + 0.5) * POSITIONS, statistics.mean(found))
        for place, found in sorted(bins.items())
        if len(found) >= FEWEST
    ]


def _position_takeaway(found: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    guessing = {name: points for name, points in found.items() if name != OFF and points}
    if not guessing:
        return "Tokens come one at a time."
    best = max(guessing, key=lambda name: statistics.mean(mean for _, mean in guessing[name]))
    means = [mean for _, mean in guessing[best]]
    return f"With {best} {min(means):.1f} to {max(means):.1f} tokens come at a time along an output; off: 1."


def acceptance_by_category(drawn: Drawn, load: float) -> Plot | None:
    """Tokens that come at a time, by the category of the prompt."""
    categories = sorted({one.category for one in drawn.result.requests if one.category})
    if not categories:
        return None
    means = {
        name: [_at_a_time(drawn.requests(name, load), category) for category in categories]
        for name in drawn.result.names
    }
    axis = Axis.up_to("tokens at a time", max(max(found) for found in means.values()))
    bars = [(name, style, means[name]) for name, style in drawn.styles.items()]
    chart = bar_chart("Tokens that come at a time by category; off is 1", axis, categories, bars)
    rows = [
        [name, category, f"{mean:.2f}"]
        for name, found in means.items()
        for category, mean in zip(categories, found, strict=True)
    ]
    guessing = {name: found for name, found in means.items() if name != OFF} or means
    best = max(guessing, key=lambda name: statistics.mean(guessing[name]))
    ranked = sorted(zip(guessing[best], categories, strict=True))
    takeaway = f"Texts differ: with {best} {ranked[-1][0]:.2f} tokens come at a time in {ranked[-1][1]}"
    takeaway += f", {ranked[0][0]:.2f} in {ranked[0][1]}." if len(ranked) > 1 else "."
    return Plot("Acceptance by category", takeaway, [chart], ["setting", "category", "tokens at a time"], rows)


def _at_a_time(requests: Sequence[RequestTimes], category: str) -> float:
    counts = [count for one in requests if one.category == category for _, count in one.arrivals]
    return statistics.mean(counts) if counts else 0.0
