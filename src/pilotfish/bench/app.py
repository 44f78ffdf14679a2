"""`pilotfish bench`: parse, call one function, print."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar, cast

import typer

from pilotfish.config import EngineConfig

if TYPE_CHECKING:
    from pilotfish.bench.workload import Prompt

Report = TypeVar("Report")

app = typer.Typer(help="Parity, speed, acceptance and a step's profile.", no_args_is_help=True)

PromptsOption = Annotated[Path, typer.Option(help="JSON Lines of id and turns, or id and prompt.")]
PairOption = Annotated[str | None, typer.Option(help="pycode, or pycode@<N>m.  [default: pycode]")]
TargetOption = Annotated[Path | None, typer.Option(help="A target's directory, with --draft, instead of a pair.")]
DraftOption = Annotated[Path | None, typer.Option(help="A draft's directory, with --target.")]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Only the first rows of the file.")]
MaxTokensOption = Annotated[int, typer.Option(min=1, help="New tokens of each sequence.")]
DTypeOption = Annotated[str, typer.Option(help="float32 or bfloat16.")]
ThreadsOption = Annotated[int, typer.Option(help="Threads; 0: all cores.")]
NodesOption = Annotated[int, typer.Option(help="Nodes verified in a step.")]
LevelsOption = Annotated[int, typer.Option(help="Forwards of the draft in a step, at most.")]
WidthOption = Annotated[int, typer.Option(help="Leaves of each of the draft's forwards.")]
RepeatsOption = Annotated[int, typer.Option(min=1, help="Measurements of each kind.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else.")]
OutOption = Annotated[Path | None, typer.Option(help="Write the JSON to this file as well.")]


@app.command()
def parity(
    prompts: PromptsOption,
    pair: PairOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    limit: LimitOption = None,
    shard: Annotated[str, typer.Option(help="i/n: every n-th prompt from the i-th on.")] = "1/1",
    max_tokens: MaxTokensOption = 96,
    dtype: DTypeOption = "float32",
    threads: Annotated[str, typer.Option(help="Thread counts, separated by commas.")] = "1,2",
    json: JsonOption = False,
) -> None:
    """Compare the tokens of every drafter with those of the target alone. Exit 1 if any differ in float32."""
    from pilotfish.bench.parity import num_sequences, print_parity, run_parity
    from pilotfish.bench.workload import parse_numbers, shard_of

    thread_counts = parse_numbers("threads", threads)
    rows = shard_of(_prompts(prompts, limit), shard)
    config = _config(pair, target, draft, dtype)
    with _bar(num_sequences(len(rows), thread_counts)) as done:
        report = run_parity(config, rows, max_tokens, thread_counts, done)
    _show(report, print_parity, json=json)
    raise typer.Exit(int(report.failed))


@app.command()
def speed(
    prompts: PromptsOption,
    pair: PairOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    limit: LimitOption = None,
    max_tokens: MaxTokensOption = 96,
    dtype: DTypeOption = "bfloat16",
    threads: ThreadsOption = 2,
    repeats: RepeatsOption = 3,
    nodes: NodesOption = EngineConfig.nodes,
    levels: LevelsOption = EngineConfig.levels,
    width: WidthOption = EngineConfig.width,
    out: OutOption = None,
    json: JsonOption = False,
) -> None:
    """Tokens per second beside transformers, contestants in turn on each prompt."""
    from pilotfish.bench.speed import num_sequences, print_speed, run_speed

    rows = _prompts(prompts, limit)
    config = _config(pair, target, draft, dtype, threads=threads, nodes=nodes, levels=levels, width=width)
    with _bar(num_sequences(len(rows), repeats)) as done:
        report = run_speed(config, rows, max_tokens, repeats, done=done)
    _show(report, print_speed, out, json=json)


@app.command()
def acceptance(
    prompts: PromptsOption,
    pair: PairOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    limit: LimitOption = None,
    max_tokens: MaxTokensOption = 96,
    dtype: DTypeOption = "bfloat16",
    threads: ThreadsOption = 0,
    nodes: NodesOption = EngineConfig.nodes,
    levels: LevelsOption = EngineConfig.levels,
    width: WidthOption = EngineConfig.width,
    out: OutOption = None,
    json: JsonOption = False,
) -> None:
    """Tokens that a verify step commits, at T=0 and T=0.8. Times nothing."""
    from pilotfish.bench.acceptance import num_sequences, print_acceptance, run_acceptance

    rows = _prompts(prompts, limit)
    config = _config(pair, target, draft, dtype, threads=threads, nodes=nodes, levels=levels, width=width)
    with _bar(num_sequences(len(rows))) as done:
        report = run_acceptance(config, rows, max_tokens, done)
    _show(report, print_acceptance, out, json=json)


@app.command()
def profile(
    prompts: PromptsOption,
    pair: PairOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    limit: LimitOption = 8,
    max_tokens: MaxTokensOption = 96,
    dtype: DTypeOption = "bfloat16",
    threads: ThreadsOption = 2,
    repeats: RepeatsOption = 20,
    nodes: NodesOption = EngineConfig.nodes,
    levels: LevelsOption = EngineConfig.levels,
    width: WidthOption = EngineConfig.width,
    out: OutOption = None,
    json: JsonOption = False,
) -> None:
    """Where the time of a step goes, and what a forward costs by its rows."""
    from pilotfish.bench.profile import num_sequences, print_profile, run_profile

    rows = _prompts(prompts, limit)
    config = _config(pair, target, draft, dtype, threads=threads, nodes=nodes, levels=levels, width=width)
    with _bar(num_sequences(len(rows))) as done:
        report = run_profile(config, rows, max_tokens, repeats, done=done)
    _show(report, print_profile, out, json=json)


def _prompts(path: Path, limit: int | None) -> list[Prompt]:
    from pilotfish.bench.workload import load_prompts

    return load_prompts(path, limit)


def _config(pair: str | None, target: Path | None, draft: Path | None, dtype: str, **fields: int) -> EngineConfig:
    """A sync engine with an LM drafter, which every comparison starts from."""
    from pilotfish.bench.workload import choose_models
    from pilotfish.config import DType, EngineConfig

    models = choose_models(pair, target, draft)
    checked = cast(DType, dtype)  # EngineConfig checks it
    base = EngineConfig(target=models.target, draft=models.draft, mode="sync", drafter="lm", dtype=checked)
    return dataclasses.replace(base, **fields)  # type: ignore[arg-type]


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
