"""`pilotfish plan`: what to buy, the cost model of named devices, and published figures that it is held against."""

from __future__ import annotations

import sys
from json import dumps
from typing import TYPE_CHECKING

import typer

from pilotfish.cli.bench.commands import add_commands
from pilotfish.cli.options import JsonOption
from pilotfish.cli.plan import plan_hardware, plan_simulate, plan_splits
from pilotfish.cli.show import print_json

if TYPE_CHECKING:
    from pilotfish.plan.published import PublishedRow

app = typer.Typer(help="The cost model of named devices (docs/planning.md).", no_args_is_help=True)
add_commands(app, "plan")
app.command("hardware")(plan_hardware.hardware)
app.command("simulate")(plan_simulate.simulate)
app.command("splits")(plan_splits.splits)
app.command("whatif")(plan_hardware.whatif)

COLUMNS = ("row", "unit", "published", "predicted", "error", "kind", "what it lacks or calibrates")


@app.command("predictions")
def show_predictions() -> None:
    """Print the model's prediction of every published row that has all inputs, without what was published, as JSON."""
    from pilotfish.plan.published import predictions

    sys.stdout.write(dumps(predictions(), indent=1) + "\n")


@app.command()
def published(json: JsonOption = False) -> None:
    """Hold the model against published figures: each row with its prediction and error, and mean errors by mode."""
    print_json(_record()) if json else _print()


def _record() -> dict[str, object]:
    from msgspec import to_builtins

    from pilotfish.plan.published import GROUPS, PUBLISHED, summaries

    groups = {
        name: {"about": group.about, "sources": group.sources, "rows": list(group.rows)}
        for name, group in GROUPS.items()
    }
    rows = {
        name: {**to_builtins(row), "kind": row.kind, "predicted": row.predicted, "error": row.error}
        for name, row in PUBLISHED.items()
    }
    return {"groups": groups, "rows": rows, "summary": to_builtins(summaries())}


def _print() -> None:
    from rich.console import Console
    from rich.table import Table

    from pilotfish.plan.published import PUBLISHED, summaries

    table = Table(*COLUMNS, box=None, pad_edge=False)
    for name, row in PUBLISHED.items():
        table.add_row(name, *_cells(row))
    console = Console(highlight=False)
    console.print(table)
    for mode, errors in summaries().items():
        console.print(
            f"{mode}: error {errors.mean:.1%} in the mean, at most {errors.most:.1%}, {errors.rows} predicted rows"
        )


def _cells(row: PublishedRow) -> tuple[str, ...]:
    error = "" if row.error is None else f"{row.error:+.1%}"
    return (row.unit, _figure(row.published), _figure(row.predicted), error, row.kind, row.lacks or row.calibrates)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"
