from typing import Any

import typer
from msgspec import to_builtins

from pilotfish.cli.bench.commands import add_commands
from pilotfish.cli.options import JsonOption
from pilotfish.cli.plan import hardware, simulate
from pilotfish.cli.show import print_json, print_line, print_table, table_of
from pilotfish.plan.published import GROUPS, PUBLISHED, summaries

app = typer.Typer(help="The cost model of named devices (docs/planning.md).", no_args_is_help=True)
add_commands(app, "plan")
app.command("hardware")(hardware.hardware)
app.command("simulate")(simulate.simulate)
app.command("whatif")(hardware.whatif)


@app.command()
def published(json: JsonOption = False) -> None:
    """Hold the model against published figures: each row with its prediction and error, and mean errors by mode."""
    print_json(_record()) if json else _print()


def _record() -> dict[str, Any]:
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
    rows = [
        {
            "row": name,
            "unit": row.unit,
            "published": _figure(row.published),
            "predicted": _figure(row.predicted),
            "error": "" if row.error is None else f"{row.error:+.1%}",
            "kind": row.kind,
            "what it lacks or calibrates": row.lacks or row.calibrates,
        }
        for name, row in PUBLISHED.items()
    ]
    print_table(table_of(rows, left=rows[0]))
    for mode, of in summaries().items():
        print_line(f"{mode}: error {of.mean:.1%} in the mean, at most {of.most:.1%}, {of.rows} predicted rows")


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"
