"""`pilotfish explain`: why acceptance changed between two intervals of time."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pilotfish.cli.options import JsonOption
from pilotfish.cli.show import print_json
from pilotfish.errors import InputError, ParameterError

if TYPE_CHECKING:
    from pilotfish.operate.explaining.cohorts import CohortStatistics
    from pilotfish.operate.explaining.explanation import Cause, CohortFigures, Explanation

ROUTE = "/v1/rollout/statistics"
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
INTERVAL = "BEGIN..END, each now, an age as in 90m, 2h or 1d, or an ISO time, that begins before it ends"
#: Columns of a table in a file.
WIDTH = 120
#: Of what is said about a cause: above, right, below, left.
INDENT = (0, 0, 0, 3)
#: Rows of the table of figures.
ROWS = {
    "requests": "requests",
    "cut": "others, whose variant was cut",
    "accepted_per_step": "accepted tokens a step",
    "wanted": "steps that wanted a tree",
    "late": "of them, without one in time",
    "accepted_per_tree": "accepted tokens a tree",
    "nodes_per_tree": "nodes a tree",
    "tokens_per_step": "tokens a step",
}
SHARES = ("wanted", "late")


def explain(
    before: Annotated[str, typer.Option(metavar="INTERVAL", help="As 2h..1h: ages, now, or ISO times.")],
    after: Annotated[str, typer.Option(metavar="INTERVAL", help="As 1h..now.")],
    url: Annotated[str | None, typer.Option(help="Of the server.  [default: http://127.0.0.1:8000]")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help=f"A file that holds the answer to GET {ROUTE} instead.")
    ] = None,
    api_key_env: Annotated[
        str, typer.Option(metavar="NAME", help="Environment variable that holds the server's API key.")
    ] = "",
    html: Annotated[Path | None, typer.Option(help="Write the explanation as a page to this file, too.")] = None,
    json: JsonOption = False,
) -> None:
    """Say why acceptance changed between two intervals, and what to do (docs/explaining.md)."""
    from msgspec import to_builtins

    from pilotfish.cli.pages.document import write_file
    from pilotfish.cli.pages.explanation import explanation_page
    from pilotfish.operate.explaining import explain as explaining

    statistics = _statistics(url, source, api_key_env)
    spans = [span_of(*given, statistics.now) for given in (("before", before), ("after", after))]
    found = explaining.explain(*(statistics.between(span.begin, span.end) for span in spans))
    print_json(to_builtins(found)) if json else _print(found)
    if html is not None:
        write_file(explanation_page(found), html)


def _statistics(url: str | None, source: Path | None, api_key_env: str) -> CohortStatistics:
    from pilotfish.cli.statistics_source import LOCAL, statistics_from_file, statistics_from_server
    from pilotfish.operate.explaining.cohorts import CohortStatistics

    if source is None:
        return statistics_from_server(CohortStatistics, url or LOCAL, ROUTE, api_key_env)
    if url is not None:
        raise InputError("from: it cannot be combined with --url; give one of them")
    return statistics_from_file(CohortStatistics, source)


# -- intervals


@dataclass(frozen=True)
class TimeSpan:
    """Seconds since the epoch."""

    begin: float
    end: float


def span_of(field: str, text: str, now: float) -> TimeSpan:
    """Of an interval in words; ParameterError, naming `field`, where it is none. ISO times without a zone are local."""
    begin, found, end = text.partition("..")
    try:
        span = TimeSpan(_moment(begin, now), _moment(end, now)) if found else None
    except (ValueError, OverflowError, OSError):
        span = None
    if span is None or not span.begin < span.end:
        raise ParameterError(field, text, INTERVAL)
    return span


def _moment(text: str, now: float) -> float:
    """ValueError and its kin where it is none."""
    if text == "now":
        return now
    if age := re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])", text, re.ASCII):
        return now - float(age[1]) * UNITS[age[2]]
    return datetime.fromisoformat(text).timestamp()


# -- for people


def _print(found: Explanation) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(Text(found.sentence, style="bold"))
    if found.before is None or found.after is None:
        return
    console.print()
    console.print(_figures(found.before, found.after))
    console.print()
    for number, cause in enumerate(found.causes, start=1):
        for line in _cause(number, cause):
            console.print(line)
    if found.causes:
        console.print(Text(f"Of the change, {found.rest / found.change:.0%} is noise, or what no cause stands for."))
    console.print()
    console.print(_parts(found))


def _figures(before: CohortFigures, after: CohortFigures) -> Table:
    table = Table("", box=None, pad_edge=False)
    for heading in ("before", "after"):
        table.add_column(heading, justify="right")
    for name, words in ROWS.items():
        table.add_row(words, *(_number(name, getattr(side, name)) for side in (before, after)))
    return table


def _number(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if name in SHARES else f"{value:.2f}" if isinstance(value, float) else str(value)


def _cause(number: int, cause: Cause) -> Iterator[Text | Padding]:
    from pilotfish.operate.explaining.explain_wording import headline

    yield Text(f"{number}. {headline(cause)}", style="bold")
    yield Padding(Text(cause.sentence), INDENT, expand=False)
    yield Padding(Text.assemble(("What to do: ", "dim"), cause.advice), INDENT, expand=False)
    yield Text()


def _parts(found: Explanation) -> Table:
    table = Table("accepted tokens a step, by", box=None, pad_edge=False)
    for heading in ("mix", "within", "interaction"):
        table.add_column(heading, justify="right")
    for one in found.parts:
        table.add_row(one.dimension, *(f"{value:+.3f}" for value in (one.mix, one.within, one.interaction)))
    return table
