"""`pilotfish bench` with drafts in pools of their own: parse, call one function, print."""

from __future__ import annotations

from typing import Annotated

import typer

from pilotfish.bench.options import Pooled, RepeatsOption, SecondsOption, bar, show
from pilotfish.command import taking


@taking(Pooled)
def network(
    common: Pooled,
    round_trips: Annotated[str, typer.Option(help="Milliseconds, separated by commas.")] = "0,1,5,15,50",
    mbit: Annotated[float, typer.Option(min=0.001, help="Mbit/s of the network, in each direction.")] = 100.0,
    concurrency: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 1,
    repeats: RepeatsOption = 5,
) -> None:
    """Tokens per second with a draft pool at a distance, beside plain decoding."""
    from pilotfish.bench.network import Network, num_sequences, print_network, run_network
    from pilotfish.bench.workload import parse_milliseconds

    shape = Network(parse_milliseconds("round_trips", round_trips), mbit)
    workload, config = common.workload(), common.engine_config()
    with bar(num_sequences(workload, shape, repeats)) as done:
        report = run_network(config, workload, shape, concurrency, repeats, done=done)
    show(report, print_network, common.out, json=common.json)


@taking(Pooled)
def sharing(
    common: Pooled,
    weights: Annotated[str, typer.Option(help="Of the targets that share a pool, separated by commas.")] = "3,1",
    streams: Annotated[int, typer.Option(min=2, help="Sequences at a time of each target.")] = 8,
    seconds: SecondsOption = 10.0,
    repeats: RepeatsOption = 3,
) -> None:
    """Rows that a saturated pool grows for targets by their weights; what becomes of streams whose pool is killed."""
    from pilotfish.bench.sharing import num_windows, print_sharing, run_sharing
    from pilotfish.bench.workload import parse_numbers

    shares = parse_numbers("weights", weights)
    workload, config = common.workload(), common.engine_config()
    with bar(num_windows(repeats)) as done:
        report = run_sharing(config, workload, shares, streams, seconds, repeats, done=done)
    show(report, print_sharing, common.out, json=common.json)


@taking(Pooled)
def stall(
    common: Pooled,
    pause: Annotated[float, typer.Option(min=0.01, help="Seconds for which the draft is stopped.")] = 5.0,
    streams: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 1,
    seconds: SecondsOption = 10.0,
    repeats: RepeatsOption = 3,
) -> None:
    """The target's steps before, while and after its draft stands still (SIGSTOP)."""
    from pilotfish.bench.stall import num_windows, print_stall, run_stall

    workload, config = common.workload(), common.engine_config()
    with bar(num_windows(repeats)) as done:
        report = run_stall(config, workload, streams, seconds, pause, repeats, done=done)
    show(report, print_stall, common.out, json=common.json)
