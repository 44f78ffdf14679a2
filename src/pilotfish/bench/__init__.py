"""`pilotfish bench`: measure and compare. Each command parses its options, measures, and shows the report."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from pilotfish.bench.headline import read_comparison, write_headline
from pilotfish.bench.options import BENCHES, Bench
from pilotfish.bench.page import write_page
from pilotfish.bench.saved import read_result, saved_result
from pilotfish.command import Given, taking
from pilotfish.errors import EngineError

app = typer.Typer(
    help=(
        "Modes of speculation and their report, tuning, parity, task success, speed beside other engines, acceptance, "
        "budgets, steps, quantization, KV, GPUs, draft "
        "pools, the server, simulated fleets."
    ),
    no_args_is_help=True,
)


def _run(bench: Bench, given: Given) -> None:
    from pilotfish.bench.provenance import provenance
    from pilotfish.bench.report import ProgressBar, Report, describe_machine, write_json

    options = bench.options(**given)
    module, _, function = bench.measure.rpartition(".")
    measure = getattr(importlib.import_module(f"pilotfish.bench.{module}"), function)
    with ProgressBar() as progress:
        report: Report = measure(options, progress)
    report = dataclasses.replace(report, conditions={**bench.conditions(options), "run": provenance()})
    if bench.timed:
        report.conditions["machine"] = describe_machine(report.dtype)
    if options.out is not None:
        write_json(report, options.out)
    if options.json:
        sys.stdout.write(report.as_json())
    else:
        report.show()
    if options.html is not None:
        write_page(saved_result(report.as_json(), bench.measure), options.html)
    if report.error:
        raise EngineError(report.error)
    raise typer.Exit(int(report.failed))


@app.command("page")
def draw(
    result: Annotated[Path, typer.Argument(metavar="RESULT.json", help="What bench run, tune or serve wrote.")],
    html: Annotated[Path, typer.Option(help="Write the page to this file.")],
) -> None:
    """Draw the page of a saved result: one HTML file, which needs no network."""
    write_page(read_result(result), html)


@app.command("chart")
def draw_chart(
    result: Annotated[Path, typer.Argument(metavar="RESULT.json", help="What bench compare wrote.")],
    svg: Annotated[Path, typer.Option(help="Write the chart to this file.")],
    title: Annotated[str, typer.Option(help="Above the bars.")] = "Greedy decoding, one request at a time",
) -> None:
    """Draw tokens a second of Pilotfish and of other engines as bars."""
    write_headline(read_comparison(result), title, svg)


def add_commands(group: typer.Typer, name: str) -> None:
    """The commands of a group, `bench` or `plan`."""
    for command, bench in BENCHES.items():
        if bench.group == name:
            group.command(command, help=bench.help)(taking(bench.declared())(partial(_run, bench)))


add_commands(app, "bench")
