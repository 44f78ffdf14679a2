"""`pilotfish rollout`: variants of speculation, compared."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pilotfish.cli.options import JsonOption
from pilotfish.cli.show import print_json
from pilotfish.errors import InputError
from pilotfish.printable import one_line

if TYPE_CHECKING:
    from pilotfish.operate.arms import RolloutArms
    from pilotfish.operate.report import RolloutReport, RolloutRow

app = typer.Typer(help="Variants of speculation under traffic (docs/rollout.md).", no_args_is_help=True)

ROUTE = "/v1/rollout"
#: Characters, however narrow the terminal.
TABLE_WIDTH = 160


@app.command()
def report(
    url: Annotated[
        list[str] | None, typer.Option(help="Of a server; several for several.  [default: http://127.0.0.1:8000]")
    ] = None,
    source: Annotated[
        list[Path] | None, typer.Option("--from", help=f"A file that holds the answer to GET {ROUTE} instead.")
    ] = None,
    api_key_env: Annotated[
        str, typer.Option(metavar="NAME", help="Environment variable that holds the server's API key.")
    ] = "",
    alpha: Annotated[
        float, typer.Option(help="The chance that a difference of ITL is ever reported where there is none.")
    ] = 0.05,
    html: Annotated[Path | None, typer.Option(help="Write the report as a page to this file, too.")] = None,
    json: JsonOption = False,
) -> None:
    """Say what each variant does beside the holdout. Look as often as you like: its intervals allow for that."""
    from msgspec import to_builtins

    from pilotfish.cli.pages.document import write_file
    from pilotfish.cli.pages.rollout import rollout_page
    from pilotfish.operate.report import rollout_report

    made = rollout_report(_read(url or [], source or [], api_key_env), alpha)
    print_json(to_builtins(made)) if json else _print(made)
    if html is not None:
        write_file(rollout_page(made), html)


def _read(urls: Sequence[str], files: Sequence[Path], api_key_env: str) -> RolloutArms:
    """The arms of all sources together. InputError where there is nothing to report of."""
    from pilotfish.cli.statistics_source import LOCAL, statistics_from_file, statistics_from_server
    from pilotfish.operate.arms import RolloutArms

    if urls and files:
        raise InputError("from: it cannot be combined with --url; give one of them")
    ask = partial(statistics_from_server, RolloutArms, route=ROUTE, api_key_env=api_key_env)
    found = [statistics_from_file(RolloutArms, file) for file in files] or [ask(url) for url in urls or [LOCAL]]
    first, *others = found
    for other in others:
        if other.holdout != first.holdout:
            raise InputError(f"holdout: {first.holdout!r} and {other.holdout!r} cannot be compared with as one")
        first.merge(other)
    if not first.arms:
        raise InputError("rollout: no request has ended yet, so there is nothing to report")
    return first


def _print(made: RolloutReport) -> None:
    from pilotfish.operate.report import notes, summary

    console = Console(highlight=False)
    console.width = max(console.width, TABLE_WIDTH)
    for line in summary(made):
        console.print(one_line(line), markup=False, soft_wrap=True)
    console.print()
    console.print(_table(made.rows))
    console.print()
    for line in notes(made):
        console.print(one_line(line), markup=False, soft_wrap=True)


def _table(rows: Sequence[RolloutRow]) -> Table:
    from pilotfish.operate.findings import WORDS, value_text

    table = Table("measure", "variant", box=None, pad_edge=False)
    table.add_column("observations", justify="right")
    table.add_column("mean")
    table.add_column("beside the holdout")
    for row in rows:
        if row.observations:
            name = WORDS[row.measure].title + ("" if row.primary else ", secondary")
            cells = (name, row.variant, str(row.observations), value_text(row.measure, row.value), row.finding)
            table.add_row(*(Text(one_line(cell)) for cell in cells), style="bold" if row.primary else None)
    return table
