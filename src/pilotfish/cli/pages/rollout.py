from collections.abc import Iterator, Sequence
from xml.etree.ElementTree import Element

from pilotfish.cli.pages.charts import BOTTOM, LABEL, RIGHT, TOP, WIDTH, Axis, line, ruled, svg, text
from pilotfish.cli.pages.document import table, tag, whole_page
from pilotfish.operate.intervals import Interval
from pilotfish.operate.report import WORDS, RolloutReport, RolloutRow, notes, summary, value_text

#: Widths in a chart's units: of the variants' names, of a variant's line.
LEFT, LINE = 104, 26
ROOM = WIDTH - LEFT - RIGHT
#: Extent of an axis where all intervals are 0.
LEAST = 0.1
#: Classes of a difference by whether it is an improvement.
STYLES = {True: "hit", False: "miss", None: "plain"}
KEYS = {"hit": "better than the holdout", "miss": "worse", "plain": "no difference seen"}
AXES = {
    "ratio": "difference to the holdout (%)",
    "count": "difference to the holdout",
    "share": "difference to the holdout (points)",
}
COLUMNS = ["variant", "observations", "mean", "beside the holdout"]


def rollout_page(report: RolloutReport) -> str:
    title = "Variants of speculation beside the holdout"
    keys = [tag("span", tag("i", class_=f"swatch {style}"), words) for style, words in KEYS.items()]
    body = tag(
        "main",
        tag("h1", title),
        *(tag("p", words) for words in summary(report)),
        tag("nav", *keys, class_="legend"),
        tag("div", *_sections(report), class_="plots"),
        tag("section", tag("h2", "How to read it"), *(tag("p", words) for words in notes(report))),
    )
    return whole_page(title, body)


def _sections(report: RolloutReport) -> Iterator[Element]:
    for measure, words in WORDS.items():
        rows = [row for row in report.rows if row.measure == measure]
        if any(row.observations for row in rows):
            title = words.title if rows[0].primary else f"{words.title} (secondary)"
            chart = _chart(measure, rows)
            cells = [[r.variant, str(r.observations), value_text(r.measure, r.value), r.finding] for r in rows]
            yield tag(
                "section",
                tag("h3", title),
                *(tag("p", f"{row.variant}: {row.finding}", class_="takeaway") for row in rows if row.finding),
                None if chart is None else tag("div", tag("figure", chart), class_="chart"),
                tag("details", tag("summary", "Numbers"), table(COLUMNS, cells)),
            )


def _chart(measure: str, rows: Sequence[RolloutRow]) -> Element | None:
    """Each variant's difference with its interval, on both sides of the holdout's line; None without any."""
    words = WORDS[measure]
    scale = 1.0 if words.kind == "count" else 100.0
    drawn = {row.variant: (row, _scaled(row.difference, scale)) for row in rows if row.difference is not None}
    if not drawn:
        return None
    axis = _mirrored(AXES[words.kind], max(max(abs(at.low), abs(at.high)) for _, at in drawn.values()))
    height = TOP + BOTTOM + LINE * len(drawn)
    parts = ruled(axis, LEFT, ROOM, TOP, height)
    for place, (row, interval) in enumerate(drawn.values()):
        parts += _whisker(axis, row, interval, TOP + LINE * (place + 0.5))
    return svg(f"{words.title}: differences to the holdout", WIDTH, height, *parts)


def _scaled(interval: Interval, scale: float) -> Interval:
    return Interval(scale * interval.estimate, scale * interval.low, scale * interval.high)


def _mirrored(label: str, most: float) -> Axis:
    ticks = Axis.up_to(label, max(most, LEAST)).ticks
    return Axis(label, -ticks[-1], ticks[-1], sorted({sign * tick for tick in ticks[::2] for sign in (-1, 1)}))


def _whisker(axis: Axis, row: RolloutRow, interval: Interval, y: float) -> list[Element]:
    style = STYLES[row.better]
    name = row.variant if len(row.variant) <= LABEL else row.variant[: LABEL - 1] + "…"
    hint = tag("title", f"{row.variant}: {row.finding}")
    low, middle, high = (LEFT + axis.share(value) * ROOM for value in (interval.low, interval.estimate, interval.high))
    return [
        text(LEFT - 6, y + 4, name, "end"),
        line(low, y, high, y, f"line {style}"),
        tag("circle", hint, cx=middle, cy=y, r=4, class_=f"dot {style}"),
    ]
