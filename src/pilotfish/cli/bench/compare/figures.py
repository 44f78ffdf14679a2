"""Figures of engines that were compared, and their chart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from pilotfish.cli.bench.compare.peer import PLAIN, Generated
from pilotfish.cli.bench.contestants import OFF, over, rates
from pilotfish.cli.bench.report import Row, Spread, distinct_ngrams, equal_share
from pilotfish.cli.pages.charts import BOTTOM, Axis, rect, ruled, svg, text
from pilotfish.cli.pages.document import tag

TRANSFORMERS = "transformers"
#: Outputs of each contestant, round by round.
Rounds = Mapping[str, Sequence[Generated]]


@dataclass(frozen=True)
class Contender:
    engine: str
    way: str
    precision: str

    @property
    def name(self) -> str:
        if self.engine == PILOTFISH:
            return self.way
        return self.engine if self.way == PLAIN else f"{self.engine}, {self.way}"

    @property
    def plain(self) -> str:
        """The contestant that is the same engine without guesses."""
        return OFF if self.engine == PILOTFISH else self.engine


def speed_row(contender: Contender, rounds: Rounds, *, greedy: bool) -> Row:
    """Seconds and tokens in all. `equal_to_plain` is the share of outputs that are those of the same engine without
    guesses, which sampling promises of none but ours; `as_transformers`, greedily, of each output the share of its
    tokens before the first that is not transformers'."""
    runs = rounds[contender.name]
    own, steps = [run.tokens for run in runs], sum(run.verify_steps for run in runs)
    row: Row = {
        "contestant": contender.name,
        "tokens_per_second": Spread.of(rates(runs)),
        "seconds": sum(run.seconds for run in runs),
        "tokens": sum(map(len, own)),
    }
    bases = {"over_off": OFF, "over_transformers": TRANSFORMERS}
    row |= {column: over(contender.name, base, rounds) for column, base in bases.items() if base in rounds}
    row["tokens_per_verify_step"] = row["tokens"] / steps if steps else None
    row["distinct_4grams"] = distinct_ngrams(own)
    if contender.plain in rounds and (greedy or contender.engine == PILOTFISH):
        row["equal_to_plain"] = equal_share(own, [run.tokens for run in rounds[contender.plain]])
    if greedy and TRANSFORMERS in rounds:
        theirs = [run.tokens for run in rounds[TRANSFORMERS]]
        row["as_transformers"] = Spread.of([_agreeing(*each) for each in zip(own, theirs, strict=True)])
    return row


def _agreeing(output: Sequence[int], other: Sequence[int]) -> float:
    same = [a == b for a, b in zip(output, other, strict=False)]
    return (same.index(False) if False in same else len(same)) / max(len(output), len(other))


def ratios_of(field: Mapping[str, Contender], rounds: Rounds) -> list[Row]:
    """Our contestants over each other engine: over it without guesses, over the way of guessing that has the best
    median, and over the faster of these two, chosen in each round."""
    ours = [name for name in rounds if field[name].engine == PILOTFISH]
    known = {**rounds}
    below: list[str] = []
    for engine in dict.fromkeys(field[name].engine for name in rounds):
        if engine != PILOTFISH:
            own = [name for name in rounds if field[name].engine == engine]
            guessing = [name for name in own if name != engine]
            below.append(engine)
            if guessing:
                best = max(guessing, key=lambda name: Spread.of(rates(rounds[name])).median)
                better = f"{engine}, better of plain and {field[best].way}"
                turns = zip(rounds[engine], rounds[best], strict=True)
                known[better] = [max(both, key=attrgetter("tokens_per_second")) for both in turns]
                below += [best, better]
    return [{"numerator": n, "denominator": d, "ratio": over(n, d, known)} for d in below for n in ours]


#: The engine whose bars are coloured.
PILOTFISH = "Pilotfish"
TITLE = "Tokens a second, one request at a time"
#: In the units in which text has 11. Names stand to the left of the bars.
WIDTH, NAMES, ROW, TOP = 640, 220, 22, 34
STYLE = Path(__file__).with_name("chart.css")


def headline(compared: Mapping[str, Any]) -> Element:
    """Tokens a second as bars, quickest first; ours are coloured. `compared` has `contestants` and `speeds`."""
    own = {row["contestant"] for row in compared["contestants"] if row["engine"] == PILOTFISH}
    medians = {row["contestant"]: row["tokens_per_second"].median for row in compared["speeds"]}
    ranked = sorted(medians, key=lambda name: -medians[name])
    axis = Axis.up_to("tokens a second", medians[ranked[0]] * 1.05)
    height, room = TOP + ROW * len(ranked) + BOTTOM, WIDTH - NAMES - 60
    parts = [*ruled(axis, NAMES, room, TOP - 4, height), text(8, 18, TITLE, style="title")]
    for place, name in enumerate(ranked):
        style = "plain" if name == OFF else "ours" if name in own else "other"
        top, wide = TOP + ROW * place, axis.share(medians[name]) * room
        parts.append(text(NAMES - 8, top + ROW / 2 + 3, name if style == "other" else f"{PILOTFISH}, {name}", "end"))
        parts.append(rect(NAMES, top, max(wide, 1.0), ROW - 6, style))
        parts.append(text(NAMES + wide + 6, top + ROW / 2 + 3, f"{medians[name]:.1f}"))
    return svg(TITLE, WIDTH, height, tag("style", STYLE.read_text("utf-8")), *parts)
