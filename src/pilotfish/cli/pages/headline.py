"""The chart of `bench compare --svg`: tokens a second of each contestant, ours among the others, as one SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from pilotfish.cli.pages.charts import Axis, line, number, rect, svg, text
from pilotfish.cli.pages.document import tag
from pilotfish.cli.pages.saved_result import OFF

#: The engine whose bars are coloured.
PILOTFISH = "Pilotfish"
TITLE = "Tokens a second, one request at a time"
#: In the units in which text has 11. Names stand to the left of the bars.
WIDTH, NAMES, ROW, TOP, BOTTOM = 640, 220, 22, 34, 38
#: Light and dark, as the page that it stands on.
STYLE = """
text { font: 11px system-ui, sans-serif; fill: #1c2430 } .title { font-size: 13px; font-weight: 600 }
.ours { fill: #1f6fd6 } .plain { fill: #6b7684 } .other { fill: #c3cad3 } .grid { stroke: #e3e7ec }
@media (prefers-color-scheme: dark) { text { fill: #e6eaf0 } .grid { stroke: #2c3541 } .other { fill: #556070 }
  .ours { fill: #64a8ff } .plain { fill: #9aa5b3 } }
"""


def headline(compared: Mapping[str, Any]) -> Element:
    """Bars, quickest first; ours are coloured. `compared` has the tables `contestants` and `speeds`."""
    own = {row["contestant"] for row in compared["contestants"] if row["engine"] == PILOTFISH}
    medians = {row["contestant"]: row["tokens_per_second"].median for row in compared["speeds"]}
    ranked = sorted(medians, key=lambda name: -medians[name])
    axis = Axis.up_to("tokens a second", medians[ranked[0]] * 1.05)
    height, room = TOP + ROW * len(ranked) + BOTTOM, WIDTH - NAMES - 60
    places = [(number(tick), NAMES + axis.share(tick) * room) for tick in axis.ticks]
    parts = [line(x, TOP - 4, x, height - BOTTOM, "grid") for _, x in places]
    parts += [text(x, height - BOTTOM + 16, label, "middle") for label, x in places]
    parts += [text(NAMES + room / 2, height - 5, axis.label, "middle"), text(8, 18, TITLE, style="title")]
    for place, name in enumerate(ranked):
        style = "plain" if name == OFF else "ours" if name in own else "other"
        parts += _bar(name, medians[name], TOP + ROW * place, axis.share(medians[name]) * room, style)
    return svg(TITLE, WIDTH, height, tag("style", STYLE), *parts)


def _bar(name: str, speed: float, top: float, wide: float, style: str) -> Sequence[Element]:
    middle, shown = top + ROW / 2 + 3, name if style == "other" else f"{PILOTFISH}, {name}"
    bar = rect(NAMES, top, max(wide, 1.0), ROW - 6, style)
    return text(NAMES - 8, middle, shown, "end"), bar, text(NAMES + wide + 6, middle, f"{speed:.1f}")
