from collections.abc import Iterator
from xml.etree.ElementTree import Element

from pilotfish.cli.pages.charts import Axis, bar_chart, line_chart
from pilotfish.cli.pages.document import table, tag, whole_page
from pilotfish.operate.explaining.explain_wording import headline
from pilotfish.operate.explaining.explanation import Cause, Explanation

TITLE = "Why acceptance changed"
#: Classes of the two intervals, and of effects by whether they lowered acceptance.
SIDES = {"before": "s0", "after": "s1"}
EFFECTS = {"raised": "hit", "lowered": "miss"}


def explanation_page(found: Explanation) -> str:
    changed = "good" if found.change > 0 else "alarm"
    notice = {"unclear": "notice", "same": "good", "changed": changed}[found.verdict]
    parts = [tag("h1", TITLE), tag("p", found.sentence, class_=notice), *map(_cause, found.causes)]
    body = tag("main", *parts, tag("div", *_plots(found), class_="plots"))
    return whole_page(TITLE, body)


def _cause(cause: Cause) -> Element:
    advice = tag("p", tag("b", "What to do: "), cause.advice)
    return tag("section", tag("h3", headline(cause)), tag("p", cause.sentence), advice)


def _plots(found: Explanation) -> Iterator[Element]:
    if found.causes:
        yield _section("Effects of causes", EFFECTS, _effects(found))
    if found.before is not None and found.after is not None:
        yield _section("Guesses accepted, by depth", SIDES, _depths(found))
        cells = [[f"{value:+.3f}" for value in (one.mix, one.within, one.interaction)] for one in found.parts]
        rows = [[one.dimension, *numbers] for one, numbers in zip(found.parts, cells, strict=True)]
        heads = ["accepted tokens a step, by", "mix", "within", "interaction"]
        yield tag("section", tag("h3", "Shares, rates, or both"), table(heads, rows))


def _section(title: str, keys: dict[str, str], chart: Element) -> Element:
    legend = [tag("span", tag("i", class_=f"swatch {style}"), words) for words, style in keys.items()]
    figure = tag("div", tag("figure", chart), class_="chart")
    return tag("section", tag("h3", title), figure, tag("p", *legend, class_="legend"))


def _effects(found: Explanation) -> Element:
    signed = {"raised": 1.0, "lowered": -1.0}
    axis = Axis.up_to("accepted tokens a step", max(abs(one.effect) for one in found.causes))
    series = [
        (words, style, [max(signed[words] * one.effect, 0.0) for one in found.causes])
        for words, style in EFFECTS.items()
    ]
    groups = [f"{number}. {one.kind}" for number, one in enumerate(found.causes, start=1)]
    return bar_chart("Accepted tokens a step that each cause gave or took", axis, groups, series)


def _depths(found: Explanation) -> Element:
    series = list[tuple[str, str, list[tuple[float, float]]]]()
    for words, style in SIDES.items():
        depths = getattr(found, words).by_depth
        points = [(float(depth), share) for depth, share in enumerate(depths, start=1) if share is not None]
        series += [(words, style, points)] if points else []
    last = max((point[0] for one in series for point in one[2]), default=1.0)
    depth = Axis("depth", 0.5, last + 0.5, [float(tick) for tick in range(1, int(last) + 1)])
    share = Axis("share of guesses accepted", 0.0, 1.0, (0, 0.25, 0.5, 0.75, 1))
    return line_chart("Of guesses whose path was accepted so far, those that were accepted", depth, share, series)
