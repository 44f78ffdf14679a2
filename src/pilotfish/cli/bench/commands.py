"""`pilotfish bench`: measure and compare. Each command parses its options, measures, and shows the report."""

import dataclasses
import importlib
import sys
from functools import partial

import typer

from pilotfish.cli.bench.options import BENCHES, Bench
from pilotfish.cli.pages.document import write_file
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
    if report.error:
        raise EngineError(report.error)
    raise typer.Exit(int(report.failed))


def add_commands(group: typer.Typer, name: str) -> None:
    for command, bench in BENCHES.items():
        if bench.group == name:
            group.command(command, help=bench.help)(taking(bench.declared())(partial(_run, bench)))


add_commands(app, "bench")
