"""`pilotfish models check`: whether a model or a pair would run here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pilotfish.cli.options import JsonOption
from pilotfish.cli.show import print_json
from pilotfish.command import Given, taking
from pilotfish.config import EngineConfig
from pilotfish.errors import ParameterError
from pilotfish.options import pick
from pilotfish.printable import one_line

if TYPE_CHECKING:
    from pilotfish.engine.memory import CheckReport, ModelFacts

app = typer.Typer(help="Look at models before serving them.", no_args_is_help=True, callback=lambda: None)


@app.command()
@taking(
    pick(EngineConfig, "dtype", "quantization", "kv_dtype", "device", "kv_slots", "memory", "eager", "tensor_parallel")
)
def check(
    engine: Given,
    directory: Annotated[Path, typer.Argument(help="A model, or a pair: a directory of target and draft.")],
    draft: Annotated[Path | None, typer.Option(help="A draft's directory, to be checked with the model.")] = None,
    json: JsonOption = False,
) -> None:
    """Say whether DIRECTORY would run, how much memory it takes, and why not. Exit 0: it would; 2: it would not."""
    if not directory.is_dir():
        raise ParameterError("directory", str(directory), "a model directory in Hugging Face format, or one of a pair")
    if (directory / "target").is_dir():
        directory, draft = directory / "target", draft or directory / "draft"
    config = EngineConfig(target=directory, draft=draft, mode="off" if draft is None else "sync", **engine)
    from pilotfish.engine.memory import check_models

    report = check_models(config)
    print_json(_record(report)) if json else _print(report)
    raise typer.Exit(0 if report.would_run else 2)


def _record(report: CheckReport) -> dict[str, object]:
    plan = report.memory
    memory = None if plan is None else {**dataclasses.asdict(plan), "total": plan.total, "workspace": plan.workspace}
    return {**dataclasses.asdict(report), "memory": memory, "would_run": report.would_run}


def _print(report: CheckReport) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for role, facts in (("target", report.target), ("draft", report.draft)):
        if facts is not None:
            console.print(_table(role, facts))
    if report.memory is not None:
        console.print(report.memory.describe(), soft_wrap=True)
    for problem in report.problems:
        console.print(one_line(f"problem: {problem}"), soft_wrap=True, markup=False)
    console.print("would run" if report.would_run else "would not run")


def _table(role: str, facts: ModelFacts) -> object:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=role, title_justify="left", box=None, show_header=False, pad_edge=False)
    rows = {
        "directory": facts.directory,
        "architecture": facts.architecture,
        "layers": facts.layers,
        "context": facts.context,
        "vocabulary": facts.vocab_size,
        "runs on": f"{facts.runs_on}, in {facts.dtype}",
        "weights": f"{facts.file_bytes / (1 << 30):.2f} GiB in {facts.files} files",
        "chat template": "yes" if facts.chat_template else "no",
        "ends at": ", ".join(map(str, facts.eos_ids)) or "max tokens only",
        "its own defaults": ", ".join(f"{k} {v}" for k, v in facts.sampling_defaults.items()) or "none",
    }
    for name, value in rows.items():
        table.add_row(name, Text(one_line(str(value)), overflow="fold"))
    return table
