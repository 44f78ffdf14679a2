"""`pilotfish bench`: parse, call one function, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from pilotfish.bench.options import (
    Common,
    JsonOption,
    Measured,
    Pooled,
    RepeatsOption,
    SecondsOption,
    Shaped,
    bar,
    show,
)
from pilotfish.command import taking
from pilotfish.config import DType, EngineConfig, Quantization, available_cores
from pilotfish.errors import ParameterError

app = typer.Typer(
    help="Parity, speed, acceptance, budgets, what steps cost and why, quantization, GPUs, and draft pools.",
    no_args_is_help=True,
)


@app.command()
@taking(Common)
def parity(
    common: Common,
    shard: Annotated[str, typer.Option(help="i/n: every n-th prompt from the i-th on.")] = "1/1",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    threads: Annotated[str, typer.Option(help="Thread counts, separated by commas.")] = "1,2",
) -> None:
    """Compare the tokens of every drafter with those of the target alone. Exit 1 if any differ in float32."""
    from pilotfish.bench.parity import num_sequences, print_parity, run_parity
    from pilotfish.bench.workload import parse_numbers, shard_of

    thread_counts = parse_numbers("threads", threads)
    rows = shard_of(common.rows(), shard)
    config = common.config(dtype)
    with bar(num_sequences(len(rows), thread_counts)) as done:
        report = run_parity(config, rows, common.max_tokens, thread_counts, done)
    show(report, print_parity, json=common.json)
    raise typer.Exit(int(report.failed))


@app.command()
@taking(Measured)
def speed(common: Measured, repeats: RepeatsOption = 3) -> None:
    """Tokens per second beside transformers, contestants in turn on each prompt."""
    from pilotfish.bench.speed import num_sequences, print_speed, run_speed

    rows, config = common.rows(), common.engine_config()
    with bar(num_sequences(len(rows), repeats)) as done:
        report = run_speed(config, rows, common.max_tokens, repeats, done=done)
    show(report, print_speed, common.out, json=common.json)


@app.command()
@taking(Measured)
def acceptance(common: Measured) -> None:
    """Tokens that a verify step commits, at T=0 and T=0.8. Times nothing."""
    from pilotfish.bench.acceptance import num_sequences, print_acceptance, run_acceptance

    rows, config = common.rows(), common.engine_config()
    with bar(num_sequences(len(rows))) as done:
        report = run_acceptance(config, rows, common.max_tokens, done)
    show(report, print_acceptance, common.out, json=common.json)


@app.command()
@taking(Measured)
def profile(common: Measured, repeats: RepeatsOption = 20) -> None:
    """Where the time of a step goes, and what a forward costs by its rows."""
    from pilotfish.bench.profile import num_sequences, print_profile, run_profile

    rows, config = common.rows(), common.engine_config()
    with bar(num_sequences(len(rows))) as done:
        report = run_profile(config, rows, common.max_tokens, repeats, done=done)
    show(report, print_profile, common.out, json=common.json)


@app.command()
@taking(Measured)
def budget(
    common: Measured,
    concurrency: Annotated[str, typer.Option(help="Sequences at a time, separated by commas.")] = "1,2,4,8,16,32",
    fixed: Annotated[str, typer.Option(help="Nodes of the fixed trees, separated by commas.")] = "2,4,8,16",
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 0.8,
    batches: Annotated[int, typer.Option(min=1, help="Sequences of a round, in multiples of the concurrency.")] = 2,
    repeats: RepeatsOption = 3,
) -> None:
    """Tokens per second with the adaptive budget beside fixed trees and plain decoding, by concurrency."""
    from pilotfish.bench.budget import Workload, num_sequences, print_budget, run_budget
    from pilotfish.bench.workload import parse_numbers

    numbers = parse_numbers("concurrency", concurrency), parse_numbers("fixed", fixed)
    workload = Workload(common.rows(), temperature, common.max_tokens, batches)
    config = common.engine_config()
    with bar(num_sequences(workload, *numbers, repeats)) as done:
        report = run_budget(config, workload, *numbers, repeats, done=done)
    show(report, print_budget, common.out, json=common.json)


@app.command()
def gpu(
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    repeats: RepeatsOption = 50,
    out: Annotated[Path | None, typer.Option(help="Write the JSON to this file as well.")] = None,
    json: JsonOption = False,
) -> None:
    """What a step and its attention cost on a CUDA GPU, with random weights."""
    from pilotfish.bench.gpu import TARGETS, cuda_device, print_gpu, run_gpu

    checked = cast(DType, _checked("dtype", dtype, DType))
    device = cuda_device()
    with bar(len(TARGETS)) as done:
        report = run_gpu(device, checked, repeats, done)
    show(report, print_gpu, out, json=json)


@app.command()
def steps(
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0: all cores.")] = 2,
    quantization: Annotated[str, typer.Option(help="Weights: none or int8.")] = EngineConfig.quantization,
    repeats: RepeatsOption = 20,
    out: Annotated[Path | None, typer.Option(help="Write the JSON to this file as well.")] = None,
    json: JsonOption = False,
) -> None:
    """What a step costs on the CPU beside the reading of its weights, kernel by kernel, with random weights."""
    import torch

    from pilotfish.bench.steps import num_rounds, print_steps, run_steps

    precision = cast(DType, _checked("dtype", dtype, DType))
    weights = cast(Quantization, _checked("quantization", quantization, Quantization))
    torch.set_num_threads(threads or available_cores())
    with bar(num_rounds(repeats)) as done:
        report = run_steps(precision, weights, repeats, done=done)
    show(report, print_steps, out, json=json)


@app.command()
@taking(Shaped)
def quantization(common: Shaped, repeats: RepeatsOption = 20) -> None:
    """Loss, acceptance and forwards with int8 weights, beside those of plain weights."""
    from pilotfish.bench.quantization import num_sequences, print_quantization, run_quantization

    rows, config = common.rows(), common.engine_config()
    with bar(num_sequences(len(rows))) as done:
        report = run_quantization(config, rows, common.max_tokens, repeats, done=done)
    show(report, print_quantization, common.out, json=common.json)


@app.command()
def memory(
    pair: Annotated[str | None, typer.Option(help="pycode, or pycode@<N>m.  [default: pycode]")] = None,
    target: Annotated[Path | None, typer.Option(help="A target's directory, with --draft, instead of a pair.")] = None,
    draft: Annotated[Path | None, typer.Option(help="A draft's directory, with --target.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    quantization: Annotated[str, typer.Option(help="Weights: none or int8.")] = EngineConfig.quantization,
    kv_slots: Annotated[int, typer.Option(help="Tokens that fit into the KV pool; 0: planned.")] = 16384,
    max_requests: Annotated[int, typer.Option(min=1, help="Sequences that fill it.")] = EngineConfig.max_requests,
    json: JsonOption = False,
) -> None:
    """The memory plan against what the process takes when rows and slots are all in use. CPU."""
    from pilotfish.bench.memory import print_memory, run_memory
    from pilotfish.bench.workload import choose_models

    models = choose_models(pair, target, draft)
    config = EngineConfig(
        target=models.target,
        draft=models.draft,
        mode="sync",
        drafter="lm",
        dtype=cast(DType, dtype),
        quantization=cast(Quantization, quantization),
        kv_slots=kv_slots,
        max_requests=max_requests,
    )
    with bar(max_requests) as done:
        report = run_memory(config, done)
    show(report, print_memory, json=json)


@app.command()
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


@app.command()
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


@app.command()
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


def _checked(field: str, value: str, kind: Any) -> str:
    """`value`; ParameterError unless the Literal `kind` has it."""
    if value not in get_args(kind):
        raise ParameterError(field, value, " or ".join(get_args(kind)))
    return value
