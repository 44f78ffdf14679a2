"""`pilotfish bench`: parse, call one function, print."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import typer

from pilotfish.bench import pool_commands, server_commands
from pilotfish.bench.options import (
    Common,
    JsonOption,
    Measured,
    RepeatsOption,
    Shaped,
    bar,
    show,
)
from pilotfish.command import taking
from pilotfish.config import DType, EngineConfig, Quantization, available_cores
from pilotfish.errors import ParameterError

ParityMode = Literal["sync", "async"]
#: Settings among which the best sync one is sought.
SYNC_GRID = "2x2:8,3x2:8,4x2:8,3x4:16,4x4:16,5x4:16,4x8:16,6x8:16"

app = typer.Typer(
    help="Parity, speed, acceptance, budgets, what steps cost and why, quantization, GPUs, draft pools, the server.",
    no_args_is_help=True,
)


@app.command()
@taking(Common)
def parity(
    common: Common,
    mode: Annotated[str, typer.Option(help="sync: every drafter; async: draft workers, also paced.")] = "sync",
    shard: Annotated[str, typer.Option(help="i/n: every n-th prompt from the i-th on.")] = "1/1",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    threads: Annotated[str, typer.Option(help="The target's thread counts, separated by commas.")] = "1,2",
) -> None:
    """Compare the tokens of every drafter, or of mode async, with those of the target alone. Exit 1 if any differ in
    float32."""
    from pilotfish.bench import parity, parity_async
    from pilotfish.bench.workload import parse_numbers, shard_of

    asynchronous = _checked("mode", mode, ParityMode) == "async"
    thread_counts = parse_numbers("threads", threads)
    rows = shard_of(common.rows(), shard)
    config = common.config(dtype)
    num_sequences = parity_async.num_sequences if asynchronous else parity.num_sequences
    run = parity_async.run_parity_async if asynchronous else parity.run_parity
    with bar(num_sequences(len(rows), thread_counts)) as done:
        report = run(config, rows, common.max_tokens, thread_counts, done)
    show(report, parity.print_parity, json=common.json)
    raise typer.Exit(int(report.failed))


@app.command("async")
@taking(Common)
def asynchronous(
    common: Common,
    pace: Annotated[str, typer.Option(help="The devices.")] = "target=10.4ms,draft=2.6ms",
    sync: Annotated[str, typer.Option(help="LEVELSxWIDTH:NODES, joined by a comma.")] = SYNC_GRID,
    nodes: Annotated[int, typer.Option(help="Nodes that async verifies in a step of a sequence.")] = 16,
    leaves: Annotated[int, typer.Option(help="Leaves of a level of the draft worker.")] = EngineConfig.leaves,
    drafter: Annotated[str, typer.Option(help="lm or lm+ngram, of sync and async.")] = EngineConfig.drafter,
    temperatures: Annotated[str, typer.Option(help="Separated by commas.")] = "0.8,0",
    concurrency: Annotated[str, typer.Option(help="Sequences at a time, separated by commas.")] = "1",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    repeats: RepeatsOption = 3,
) -> None:
    """Async against off and against sync, on devices of a given pace."""
    from pilotfish.bench.asynchronous import SyncSetting, num_sequences, print_async, run_async
    from pilotfish.bench.workload import parse_numbers

    grid = [SyncSetting.parse(text) for text in sync.split(",")]
    shape = {"mode": "async", "drafter": drafter, "nodes": nodes, "leaves": leaves, "pace": pace, "budget": "fixed"}
    config = dataclasses.replace(common.config(dtype), **shape)  # type: ignore[arg-type]
    rows, at_a_time = common.rows(), parse_numbers("concurrency", concurrency)
    heat = [float(text) for text in temperatures.split(",")]
    with bar(num_sequences(len(rows), len(grid), len(heat), at_a_time, repeats)) as done:
        report = run_async(config, rows, grid, heat, at_a_time, common.max_tokens, repeats, done=done)
    show(report, print_async, json=common.json)


@app.command()
@taking(Common)
def cores(
    common: Common,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.8,
    nodes: Annotated[
        int, typer.Option(help="Nodes that sync and async verify in a step, at most.")
    ] = EngineConfig.nodes,
    leaves: Annotated[int, typer.Option(help="Leaves of a level of the draft worker.")] = EngineConfig.leaves,
    drafter: Annotated[str, typer.Option(help="lm or lm+ngram.")] = EngineConfig.drafter,
    budget: Annotated[str, typer.Option(help="auto or fixed.")] = EngineConfig.budget,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    repeats: RepeatsOption = 3,
) -> None:
    """Off and sync on all cores against async, whose target and draft have cores of their own."""
    from pilotfish.bench.cores import contestants, print_cores, run_cores

    shape = {"drafter": drafter, "nodes": nodes, "leaves": leaves, "budget": budget}
    config = dataclasses.replace(common.config(dtype), **shape)  # type: ignore[arg-type]
    rows = common.rows()
    with bar(len(rows) * len(contestants(config)) * repeats) as done:
        report = run_cores(config, rows, temperature, common.max_tokens, repeats, done=done)
    show(report, print_cores, json=common.json)


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


def _checked(field: str, value: str, kind: Any) -> str:
    """`value`; ParameterError unless the Literal `kind` has it."""
    if value not in get_args(kind):
        raise ParameterError(field, value, " or ".join(get_args(kind)))
    return value


for command in (pool_commands.network, pool_commands.sharing, pool_commands.stall):
    app.command()(command)
for command in (server_commands.http, server_commands.load, server_commands.standstill, server_commands.start):
    app.command()(command)
