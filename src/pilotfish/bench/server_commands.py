"""`pilotfish bench` of the server: parse, call one function, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from pilotfish.bench.options import JsonOption, RepeatsOption, SecondsOption, Served, bar, show
from pilotfish.command import taking
from pilotfish.config import DType, EngineConfig, Mode


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


@taking(Served)
def standstill(
    common: Served,
    streams: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 16,
    stops: Annotated[str, typer.Option(help="Seconds that the target is stopped for, separated by commas.")] = "1,5,13",
    target_timeout: Annotated[float, typer.Option(min=1.0, help="Of the server.")] = 30.0,
) -> None:
    """Stop the target's process under open streams and let it go on. Exit 1 if an output changed or a stream broke off
    below the target's timeout."""
    from pilotfish.bench.standstill import print_standstill, run_standstill
    from pilotfish.bench.workload import parse_numbers

    seconds = [float(number) for number in parse_numbers("stops", stops)]
    with bar(streams + len(seconds)) as done:
        config, rows = common.engine_config(), common.rows()
        report = run_standstill(config, rows, common.max_tokens, streams, seconds, target_timeout, done)
    show(report, print_standstill, common.out, json=common.json)
    raise typer.Exit(int(not report.holds))


def start(
    pair: Annotated[str | None, typer.Option(help="pycode, or pycode@<N>m.  [default: pycode]")] = None,
    target: Annotated[Path | None, typer.Option(help="A target's directory, with --draft, instead of a pair.")] = None,
    draft: Annotated[Path | None, typer.Option(help="A draft's directory, with --target.")] = None,
    mode: Annotated[str, typer.Option(help="off, sync or async.")] = "async",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    repeats: RepeatsOption = 5,
    json: JsonOption = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON to this file as well.")] = None,
) -> None:
    """Seconds until a server serves, and what its processes take then."""
    from pilotfish.bench.start import print_start, run_start
    from pilotfish.bench.workload import choose_models

    models = choose_models(pair, target, draft)
    checked = EngineConfig(target=models.target, draft=models.draft, mode=cast(Mode, mode), dtype=cast(DType, dtype))
    with bar(repeats) as done:
        report = run_start(checked, repeats, done)
    show(report, print_start, out, json=json)
