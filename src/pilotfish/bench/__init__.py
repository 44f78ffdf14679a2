"""`pilotfish bench`: measure and compare. Each command parses its options, measures, and shows the report."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from functools import partial

import typer

from pilotfish.bench.options import BENCHES, Bench
from pilotfish.command import Given, taking

app = typer.Typer(
    help=(
        "Parity, task success, speed beside other engines, acceptance, budgets, steps, quantization, KV, GPUs, draft "
        "pools, the server, simulated fleets."
    ),
    no_args_is_help=True,
)


def _run(bench: Bench, given: Given) -> None:
    from pilotfish.bench.report import ProgressBar, Report, describe_machine, write_json

    options = bench.options(**given)
    module, _, function = bench.measure.partition(".")
    measure = getattr(importlib.import_module(f"pilotfish.bench.{module}"), function)
    with ProgressBar() as progress:
        report: Report = measure(options, progress)
    report = dataclasses.replace(report, conditions=bench.conditions(options))
    if bench.timed:
        report.conditions["machine"] = describe_machine(report.dtype)
    if options.out is not None:
        write_json(report, options.out)
    if options.json:
        sys.stdout.write(report.as_json())
    else:
        report.show()
    raise typer.Exit(int(report.failed))


for name, bench in BENCHES.items():
    app.command(name, help=bench.help)(taking(bench.declared())(partial(_run, bench)))
