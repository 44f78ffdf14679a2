"""`pilotfish bench`: measure and compare. Each command parses its options, measures, and shows the report."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from pilotfish.cli.bench.options import BENCHES, Bench
from pilotfish.cli.pages.document import write_file
from pilotfish.cli.pages.result import page
from pilotfish.cli.pages.saved_result import saved_result
from pilotfish.cli.reading import read_bytes
from pilotfish.command import Given, taking
from pilotfish.errors import EngineError

app = typer.Typer(
    help=(
        "Modes of speculation and their report, tuning, parity, task success, thresholds of cascades, other engines, "
        "any server under load. Scripts in benchmarks/ each show one claim."
    ),
    no_args_is_help=True,
)


def _run(bench: Bench, given: Given) -> None:
    from pilotfish.cli.bench.report import ProgressBar, Report, describe_machine, provenance

    options = bench.options(**given)
    module, _, function = bench.measure.rpartition(".")
    measure = getattr(importlib.import_module(f"pilotfish.cli.{module}"), function)
    with ProgressBar() as progress:
        report: Report = measure(options, progress)
    report = dataclasses.replace(report, conditions={**bench.conditions(options), "run": provenance()})
    if bench.timed:
        report.conditions["machine"] = describe_machine(report.conditions["dtype"])
    if options.out is not None:
        write_file(report.as_json(), options.out, "out")
    if options.json:
        sys.stdout.write(report.as_json())
    else:
        report.show()
    if options.html is not None:
        write_file(page(saved_result(report.as_json(), bench.measure)), options.html)
    if report.error:
        raise EngineError(report.error)
    raise typer.Exit(int(report.failed))


@app.command("page")
def draw(
    result: Annotated[Path, typer.Argument(metavar="RESULT.json", help="What bench run, tune or serve wrote.")],
    html: Annotated[Path, typer.Option(help="Write the page to this file.")],
) -> None:
    """Draw the page of a saved result: one HTML file, which needs no network."""
    write_file(page(saved_result(read_bytes("result", result), str(result))), html)


def add_commands(group: typer.Typer, name: str) -> None:
    for command, bench in BENCHES.items():
        if bench.group == name:
            group.command(command, help=bench.help)(taking(bench.declared())(partial(_run, bench)))


add_commands(app, "bench")
