"""`pilotfish bench` of the server: parse, call one function, print."""

from __future__ import annotations

from typing import Annotated

import typer

from pilotfish.bench.options import RepeatsOption, SecondsOption, Served, bar, show
from pilotfish.command import taking


@taking(Served)
def http(
    common: Served,
    pace: Annotated[str, typer.Option(help="Emulated devices, joined by a space; none: unpaced.")] = (
        "target=20ms none"
    ),
    concurrency: Annotated[str, typer.Option(help="Sequences at a time, separated by commas.")] = "1,32",
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 0.8,
    batches: Annotated[int, typer.Option(min=1, help="Sequences of a round, in multiples of the concurrency.")] = 2,
    repeats: RepeatsOption = 5,
) -> None:
    """Tokens per second through HTTP beside the offline engine, and the time from verify's end to the socket."""
    from pilotfish.bench.http import Shape, num_rounds, print_http, run_http
    from pilotfish.bench.workload import parse_numbers

    numbers = parse_numbers("concurrency", concurrency)
    paces = ["" if one == "none" else one for one in pace.split()]
    shape = Shape(common.rows(), temperature, common.max_tokens, batches, repeats)
    with bar(num_rounds(paces, numbers, repeats)) as done:
        report = run_http(common.engine_config(), shape, paces, numbers, done=done)
    show(report, print_http, common.out, json=common.json)


@taking(Served)
def load(
    common: Served,
    seconds: SecondsOption = 300.0,
    streams: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 64,
    requests: Annotated[int, typer.Option(min=1, help="Distinct ones, each run alone first.")] = 96,
    aborts: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of streams that clients break off.")] = 0.15,
) -> None:
    """Requests of many kinds at a time, against the same ones alone; memory, and what is held afterwards. Exit 1 if
    anything is not as it should be."""
    from pilotfish.bench.load import Load, num_ticks, print_load, run_load

    work = Load(common.rows(), requests, streams, seconds, common.max_tokens, aborts)
    config = common.engine_config()
    with bar(num_ticks(work)) as done:
        report = run_load(config, work, done=done)
    show(report, print_load, common.out, json=common.json)
    raise typer.Exit(int(not report.holds))
