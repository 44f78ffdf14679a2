import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from pilotfish.cli.pages.document import tag

#: Size of a chart, in units of which its text has 11: as wide as a phone.
WIDTH, HEIGHT = 360, 230
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 12, 38
#: Characters of a bar's label.
LABEL = 16


@dataclass(frozen=True)
class Axis:
    label: str
    low: float
    high: float
    ticks: Sequence[float]

    @classmethod
    def up_to(cls, label: str, high: float) -> "Axis":
        """From 0, linear, with about five round ticks, the last not below `high`."""
        rough = max(high, 1e-9) / 4
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * times for times in (1, 2, 2.5, 5, 10) if unit * times >= rough)
        ticks = [step * i for i in range(math.ceil(high / step - 1e-9) + 1)]
        return cls(label, 0.0, ticks[-1], ticks)

    def share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def line_chart(
    title: str, x: Axis, y: Axis, series: Sequence[tuple[str, str, Sequence[tuple[float, float]]]]
) -> Element:
    """`series`: names, classes, and points. Those beyond the axes are drawn on the border."""

    def place(x_value: float, y_value: float) -> tuple[float, float]:
        across, up = (min(max(share, 0.0), 1.0) for share in (x.share(x_value), y.share(y_value)))
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    (left, bottom), (right, top) = place(x.low, y.low), place(x.high, y.high)
    columns = [(place(tick, y.low)[0], number(tick)) for tick in x.ticks]
    lines = [(place(x.low, tick)[1], number(tick)) for tick in y.ticks]
    parts = [
        *(line(left, height, right, height, "grid") for height, _ in lines),
        *(text(left - 6, height + 4, label, "end") for height, label in lines),
        *(line(across, bottom, across, bottom + 4, "axis") for across, _ in columns),
        *(text(across, bottom + 16, label, "middle") for across, label in columns),
        line(left, bottom, right, bottom, "axis"),
        text((left + right) / 2, HEIGHT - 5, x.label, "middle", "label"),
        tag("text", y.label, class_="label", text_anchor="middle",
            transform=f"translate(11 {(top + bottom) / 2:.0f}) rotate(-90)"),
    ]  # fmt: skip
    for name, style, points in reversed(series):
        places = [place(*point) for point in points]
        joined = "M" + "L".join(f"{across:.1f} {up:.1f}" for across, up in places)
        parts.append(tag("path", tag("title", name), d=joined, class_=f"line {style}"))
        parts += [tag("circle", cx=a, cy=b, r=3, class_=f"dot {style}") for a, b in places]
    return svg(title, WIDTH, HEIGHT, *parts)


def bar_chart(
    title: str, axis: Axis, groups: Sequence[str], series: Sequence[tuple[str, str, Sequence[float]]]
) -> Element:
    """Horizontal bars, groups below each other. `series`: names, classes, and a value for each group."""
    thick, gap, left = 11, 12, 104
    height = TOP + BOTTOM + len(groups) * (thick * len(series) + gap)
    room = WIDTH - left - RIGHT
    parts = ruled(axis, left, room, TOP, height)
    for place, group in enumerate(groups):
        top = TOP + place * (thick * len(series) + gap) + gap / 2
        shown = group if len(group) <= LABEL else group[: LABEL - 1] + "…"
        parts.append(text(left - 6, top + thick * len(series) / 2 + 4, shown, "end"))
        for index, (name, style, values) in enumerate(series):
            wide = max(axis.share(values[place]) * room, 1.0)
            hint = tag("title", f"{name}, {group}: {values[place]:.2f}")
            parts.append(rect(left, top + index * thick, wide, thick - 2, f"bar {style}", hint))
    return svg(title, WIDTH, height, *parts)


def ruled(axis: Axis, left: float, room: float, top: float, height: float) -> list[Element]:
    """A horizontal axis, its label at the foot of a chart of this `height`; on both sides of 0, that is a line too."""
    bottom, places = height - BOTTOM, [(left + axis.share(tick) * room, tick) for tick in axis.ticks]
    return [
        *(line(x, top, x, bottom, "axis" if tick == 0 > axis.low else "grid") for x, tick in places),
        *(text(x, bottom + 16, number(tick), "middle") for x, tick in places),
        text(left + room / 2, height - 5, axis.label, "middle", "label"),
    ]


def svg(title: str, width: float, height: float, *parts: Element) -> Element:
    box = f"0 0 {width:g} {height:g}"
    return tag("svg", tag("title", title), *parts, viewBox=box, role="img", xmlns="http://www.w3.org/2000/svg")


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> Element:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=style)


def rect(x: float, y: float, width: float, height: float, style: str, *children: Element) -> Element:
    return tag("rect", *children, x=x, y=y, width=width, height=height, rx=1.5, class_=style)


def text(x: float, y: float, words: str, anchor: str = "start", style: str | None = None) -> Element:
    return tag("text", words, x=x, y=y, text_anchor=anchor, class_=style)


def number(value: float) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:.3g}" if value < 1000 else f"{value:.0f}"
