"""`pilotfish bench`: parse, call one function, print."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast, get_args

import typer

from pilotfish.command import taking
from pilotfish.config import DType, EngineConfig, Quantization, available_cores
from pilotfish.errors import ParameterError

if TYPE_CHECKING:
    from pilotfish.bench.workload import Prompt

Report = TypeVar("Report")

app = typer.Typer(
    help="Parity, speed, acceptance, budgets, what steps cost and why, quantization, and GPUs.", no_args_is_help=True
)

#: Settings among which the best sync one is sought.
SYNC_GRID = "2x2:8,3x2:8,4x2:8,3x4:16,4x4:16,5x4:16,4x8:16,6x8:16"

JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else.")]
RepeatsOption = Annotated[int, typer.Option(min=1, help="Measurements of each kind.")]


@dataclass(frozen=True)
class Common:
    """Options of every command."""

    prompts: Annotated[Path, typer.Option(help="JSON Lines of id and turns, or id and prompt.")]
    pair: Annotated[str | None, typer.Option(help="pycode, or pycode@<N>m.  [default: pycode]")] = None
    target: Annotated[Path | None, typer.Option(help="A target's directory, with --draft, instead of a pair.")] = None
    draft: Annotated[Path | None, typer.Option(help="A draft's directory, with --target.")] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows of the file.")] = None
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each sequence.")] = 96
    json: JsonOption = False

    def rows(self) -> list[Prompt]:
        from pilotfish.bench.workload import load_prompts

        return load_prompts(self.prompts, self.limit)

    def config(self, dtype: str) -> EngineConfig:
        """A sync engine with an LM drafter, which every comparison starts from."""
        from pilotfish.bench.workload import choose_models

        models = choose_models(self.pair, self.target, self.draft)
        checked = cast(DType, dtype)  # EngineConfig checks it
        return EngineConfig(target=models.target, draft=models.draft, mode="sync", drafter="lm", dtype=checked)


@dataclass(frozen=True)
class Shaped(Common):
    """Options of the commands that measure one tree in one precision."""

    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16"
    threads: Annotated[int, typer.Option(help="Threads; 0: all cores.")] = 2
    nodes: Annotated[int, typer.Option(help="Nodes verified in a step.")] = EngineConfig.nodes
    levels: Annotated[int, typer.Option(help="Forwards of the draft in a step, at most.")] = EngineConfig.levels
    width: Annotated[int, typer.Option(help="Leaves of each of the draft's forwards.")] = EngineConfig.width
    out: Annotated[Path | None, typer.Option(help="Write the JSON to this file as well.")] = None

    def engine_config(self) -> EngineConfig:
        tree = {"nodes": self.nodes, "levels": self.levels, "width": self.width}
        return dataclasses.replace(self.config(self.dtype), threads=self.threads, **tree)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Measured(Shaped):
    """And in one quantization."""

    quantization: Annotated[str, typer.Option(help="Weights: none or int8.")] = EngineConfig.quantization

    def engine_config(self) -> EngineConfig:
        checked = cast(Quantization, self.quantization)
        return dataclasses.replace(super().engine_config(), quantization=checked)


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
    with _bar(num_sequences(len(rows), thread_counts)) as done:
        report = run_parity(config, rows, common.max_tokens, thread_counts, done)
    _show(report, print_parity, json=common.json)
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
    with _bar(num_sequences(len(rows), len(grid), len(heat), at_a_time, repeats)) as done:
        report = run_async(config, rows, grid, heat, at_a_time, common.max_tokens, repeats, done=done)
    _show(report, print_async, json=common.json)


@app.command()
@taking(Measured)
def speed(common: Measured, repeats: RepeatsOption = 3) -> None:
    """Tokens per second beside transformers, contestants in turn on each prompt."""
    from pilotfish.bench.speed import num_sequences, print_speed, run_speed

    rows, config = common.rows(), common.engine_config()
    with _bar(num_sequences(len(rows), repeats)) as done:
        report = run_speed(config, rows, common.max_tokens, repeats, done=done)
    _show(report, print_speed, common.out, json=common.json)


@app.command()
@taking(Measured)
def acceptance(common: Measured) -> None:
    """Tokens that a verify step commits, at T=0 and T=0.8. Times nothing."""
    from pilotfish.bench.acceptance import num_sequences, print_acceptance, run_acceptance

    rows, config = common.rows(), common.engine_config()
    with _bar(num_sequences(len(rows))) as done:
        report = run_acceptance(config, rows, common.max_tokens, done)
    _show(report, print_acceptance, common.out, json=common.json)


@app.command()
@taking(Measured)
def profile(common: Measured, repeats: RepeatsOption = 20) -> None:
    """Where the time of a step goes, and what a forward costs by its rows."""
    from pilotfish.bench.profile import num_sequences, print_profile, run_profile

    rows, config = common.rows(), common.engine_config()
    with _bar(num_sequences(len(rows))) as done:
        report = run_profile(config, rows, common.max_tokens, repeats, done=done)
    _show(report, print_profile, common.out, json=common.json)


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
    with _bar(num_sequences(workload, *numbers, repeats)) as done:
        report = run_budget(config, workload, *numbers, repeats, done=done)
    _show(report, print_budget, common.out, json=common.json)


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
    with _bar(len(TARGETS)) as done:
        report = run_gpu(device, checked, repeats, done)
    _show(report, print_gpu, out, json=json)


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
    with _bar(num_rounds(repeats)) as done:
        report = run_steps(precision, weights, repeats, done=done)
    _show(report, print_steps, out, json=json)


@app.command()
@taking(Shaped)
def quantization(common: Shaped, repeats: RepeatsOption = 20) -> None:
    """Loss, acceptance and forwards with int8 weights, beside those of plain weights."""
    from pilotfish.bench.quantization import num_sequences, print_quantization, run_quantization

    rows, config = common.rows(), common.engine_config()
    with _bar(num_sequences(len(rows))) as done:
        report = run_quantization(config, rows, common.max_tokens, repeats, done=done)
    _show(report, print_quantization, common.out, json=common.json)


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
    with _bar(max_requests) as done:
        report = run_memory(config, done)
    _show(report, print_memory, json=json)


def _checked(field: str, value: str, kind: Any) -> str:
    """`value`; ParameterError unless the Literal `kind` has it."""
    if value not in get_args(kind):
        raise ParameterError(field, value, " or ".join(get_args(kind)))
    return value


@contextmanager
def _bar(total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar; what it gives is called with a label whenever a sequence is done."""
    from pilotfish.bench.report import progress

    with progress() as bar:
        task = bar.add_task("loading", total=total)
        yield lambda label: bar.update(task, advance=1, description=label)


def _show(report: Report, table: Callable[[Report], None], out: Path | None = None, *, json: bool) -> None:
    from pilotfish.bench.report import print_json, write_json

    if out is not None:
        write_json(report, out)
    if json:
        print_json(report)
    else:
        table(report)
