"""The chart of `bench compare`: tokens a second of each contestant, ours among the others, as one SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree.ElementTree import Element, tostring

import msgspec
from msgspec import Struct

from pilotfish.bench.charts import Axis, line, number, rect, svg, text
from pilotfish.bench.markup import tag
from pilotfish.errors import ParameterError

#: In the units in which text has 11. Names stand to the left of the bars.
WIDTH, NAMES, ROW, TOP, BOTTOM = 640, 220, 22, 34, 38
#: Light and dark, as the page that it stands on.
STYLE = """
text { font: 11px system-ui, sans-serif; fill: #1c2430 } .title { font-size: 13px; font-weight: 600 }
.ours { fill: #1f6fd6 } .plain { fill: #6b7684 } .other { fill: #c3cad3 } .grid { stroke: #e3e7ec }
@media (prefers-color-scheme: dark) { text { fill: #e6eaf0 } .grid { stroke: #2c3541 } .other { fill: #556070 }
  .ours { fill: #64a8ff } .plain { fill: #9aa5b3 } }
"""
#: The engine whose bars are coloured, and its plain decoding.
OURS, OFF = "Pilotfish", "off"


class MedianSpeed(Struct, frozen=True):
    median: float


class ComparedSpeed(Struct, frozen=True):
    contestant: str
    temperature: float
    tokens_per_second: MedianSpeed


class ComparedEngine(Struct, frozen=True):
    contestant: str
    engine: str


class ComparedSpeeds(Struct, frozen=True):
    """What the chart needs of a result."""

    speeds: list[ComparedSpeed]
    contestants: list[ComparedEngine]


def read_comparison(path: Path) -> ComparedSpeeds:
    """ParameterError where the file is no result of `bench compare`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ComparedSpeeds)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ParameterError("result", str(path), f"a result of bench compare: {error}") from None


def headline(compared: ComparedSpeeds, title: str) -> Element:
    """Bars of greedy decoding, quickest first. ParameterError where there are none."""
    own = {one.contestant for one in compared.contestants if one.engine == OURS}
    greedy = [one for one in compared.speeds if not one.temperature]
    if not greedy:
        raise ParameterError("result", "no speeds", "a result of bench compare at temperature 0")
    ranked = sorted(greedy, key=lambda one: -one.tokens_per_second.median)
    axis = Axis.up_to("tokens a second", ranked[0].tokens_per_second.median * 1.05)
    height, room = TOP + ROW * len(ranked) + BOTTOM, WIDTH - NAMES - 60
    places = [(number(tick), NAMES + axis.share(tick) * room) for tick in axis.ticks]
    parts = [line(x, TOP - 4, x, height - BOTTOM, "grid") for _, x in places]
    parts += [text(x, height - BOTTOM + 16, label, "middle") for label, x in places]
    parts += [text(NAMES + room / 2, height - 5, axis.label, "middle"), text(8, 18, title, style="title")]
    for place, one in enumerate(ranked):
        style = "plain" if one.contestant == OFF else "ours" if one.contestant in own else "other"
        parts += _bar(one, TOP + ROW * place, axis.share(one.tokens_per_second.median) * room, style)
    return svg(title, WIDTH, height, tag("style", STYLE), *parts)


def _bar(one: ComparedSpeed, top: float, wide: float, style: str) -> Sequence[Element]:
    middle, speed = top + ROW / 2 + 3, one.tokens_per_second.median
    name = f"{OURS}, {one.contestant}" if style != "other" else one.contestant
    bar = rect(NAMES, top, max(wide, 1.0), ROW - 6, style)
    return text(NAMES - 8, middle, name, "end"), bar, text(NAMES + wide + 6, middle, f"{speed:.1f}")


def write_headline(compared: ComparedSpeeds, title: str, path: Path) -> None:
    path.write_bytes(tostring(headline(compared, title)) + b"\n")
