from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from msgspec import to_builtins
from rich.text import Text

from pilotfish.cli.options import JsonOption
from pilotfish.cli.pages.document import write_file
from pilotfish.cli.pages.rollout import rollout_page
from pilotfish.cli.reading import LOCAL, ApiKeyEnvOption, from_file, read_statistics
from pilotfish.cli.rollout import capture
from pilotfish.cli.show import WIDE, print_json, print_line, print_table, table_of
from pilotfish.errors import InputError
from pilotfish.operate.arms import RolloutArms
from pilotfish.operate.report import WORDS, RolloutReport, notes, rollout_report, summary, value_text
from pilotfish.printable import one_line

app = typer.Typer(help="Variants of speculation under traffic (docs/rollout.md).", no_args_is_help=True)
app.add_typer(capture.app, name="capture")

ROUTE = "/v1/rollout"


@app.command()
def report(
    url: Annotated[
        list[str] | None, typer.Option(help=f"Of a server; several for several.  [default: {LOCAL}]")
    ] = None,
    source: Annotated[list[Path] | None, from_file(ROUTE)] = None,
    api_key_env: ApiKeyEnvOption = "",
    alpha: Annotated[
        float, typer.Option(help="The chance that a difference of ITL is ever reported where there is none.")
    ] = 0.05,
    html: Annotated[Path | None, typer.Option(help="Write the report as a page to this file, too.")] = None,
    json: JsonOption = False,
) -> None:
    """Say what each variant does beside the holdout. Look as often as you like: its intervals allow for that."""
    arms, *others = read_statistics(RolloutArms, ROUTE, url or [], source or [], api_key_env)
    for other in others:
        if other.holdout != arms.holdout:
            raise InputError(f"holdout: {arms.holdout!r} and {other.holdout!r} cannot be compared with as one")
        arms.merge(other)
    if not arms.arms:
        raise InputError("rollout: no request has ended yet, so there is nothing to report")
    made = rollout_report(arms, alpha)
    print_json(to_builtins(made)) if json else _print(made)
    if html is not None:
        write_file(rollout_page(made), html)


def _print(made: RolloutReport) -> None:
    print_line(*summary(made), "")
    print_table(table_of(_rows(made), left=("variant", "mean", "beside the holdout")), at_least=WIDE)
    print_line("", *notes(made))


def _rows(made: RolloutReport) -> Iterator[dict[str, Text]]:
    for row in made.rows:
        if row.observations:
            cells = {
                "measure": WORDS[row.measure].title + ("" if row.primary else ", secondary"),
                "variant": row.variant,
                "observations": str(row.observations),
                "mean": value_text(row.measure, row.value),
                "beside the holdout": row.finding,
            }
            yield {name: Text(one_line(cell), style="bold" * row.primary) for name, cell in cells.items()}
