"""`pilotfish models check`: whether a model or a pair would run here."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from pilotfish import torchless
from pilotfish.cli.options import JsonOption
from pilotfish.cli.show import print_json
from pilotfish.command import Given, taking
from pilotfish.config.engine import EngineConfig
from pilotfish.errors import InputError, ParameterError
from pilotfish.options import pick
from pilotfish.printable import one_line

if TYPE_CHECKING:
    from pilotfish.engine.checks import CheckReport, ModelFacts
    from pilotfish.model.heads.files import HeadFacts

#: Options and their values with which a model that is whole is checked without torch.
USUAL = {"device": "cpu", "quantization": "none", "eager": False, "tensor_parallel": 1}
#: This command again, from its beginning.
AGAIN = "import sys, pilotfish, torch; from pilotfish.cli import main; sys.exit(main())"

app = typer.Typer(help="Look at models before serving them.", no_args_is_help=True, callback=lambda: None)


@app.command()
@taking(
    pick(
        EngineConfig,
        *("dtype", "quantization", "kv_dtype", "device", "kv_slots", "memory", "eager", "tensor_parallel"),
        "draft_layers",
    )
)
def check(
    engine: Given,
    context: typer.Context,
    directory: Annotated[
        Path, typer.Argument(help="A model; a pair: a directory of target and draft; a trained head.")
    ],
    draft: Annotated[Path | None, typer.Option(help="A draft's directory, to be checked with the model.")] = None,
    target: Annotated[Path | None, typer.Option(help="The model that a head was trained on.")] = None,
    json: JsonOption = False,
) -> None:
    """Say whether DIRECTORY would run, how much memory it takes, and why not. Exit 0: it would; 2: it would not."""
    if not directory.is_dir():
        raise ParameterError("directory", str(directory), "a model directory in Hugging Face format, or one of a pair")
    if context.obj and all(engine.get(name, value) == value for name, value in USUAL.items()):
        torchless.leave_out()
    look = partial(_report, engine, directory, draft, target)
    report = _found_without_torch(look) if torchless.is_left_out() else look()
    print_json(_record(report)) if json else _print(report)
    raise typer.Exit(0 if report.would_run else 2)


def _found_without_torch(look: Callable[[], CheckReport]) -> CheckReport:
    """torch, whose import takes seconds, is not needed to find a model whole. It alone says what is wrong."""
    root = logging.getLogger()
    log = MemoryHandler(sys.maxsize, logging.CRITICAL + 1, None if root.handlers else logging.lastResort, False)
    log.setLevel(logging.WARNING)
    root.addHandler(log)  # holds what would be said twice
    try:
        report = look()
    except InputError:
        raise
    except Exception:  # whatever needs torch finds that there is none
        _start_again()
    finally:
        root.removeHandler(log)
    if not report.would_run:
        _start_again()
    log.flush()
    return report


def _start_again() -> NoReturn:
    os.execv(sys.executable, [sys.executable, "-c", AGAIN, *sys.argv[1:]])


def _report(engine: Given, directory: Path, draft: Path | None, target: Path | None) -> CheckReport:
    from pilotfish.engine.checks import check_models
    from pilotfish.engine.tapping import with_features
    from pilotfish.model.heads.weights import is_head

    if (directory / "target").is_dir():
        directory, draft = directory / "target", draft or directory / "draft"
    elif is_head(directory) and draft is None:
        directory, draft = _target_of(directory, target), directory
    elif target is not None:
        raise ParameterError("target", str(target), "nothing: DIRECTORY is the target itself, unless it is a head")
    config = EngineConfig(target=directory, draft=draft, mode="off" if draft is None else "sync", **engine)
    return check_models(with_features(config))


def _target_of(head: Path, target: Path | None) -> Path:
    """The one that is given, else the one of the pair that the head is in."""
    beside = head.parent / "target"
    if target is None and not beside.is_dir():
        raise ParameterError("target", None, f"the directory of its model: {head} is a trained head")
    if target is not None and not target.is_dir():
        raise ParameterError("target", str(target), "a model directory in Hugging Face format")
    return target or beside


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
    if report.head is not None:
        console.print(_head_table(report.head))
    if report.memory is not None:
        console.print(report.memory.describe(), soft_wrap=True)
    for problem in report.problems:
        console.print(one_line(f"problem: {problem}"), soft_wrap=True, markup=False)
    console.print(one_line(_verdict(report)), soft_wrap=True, markup=False)


def _verdict(report: CheckReport) -> str:
    if not report.would_run:
        return "would not run"
    lacking = report.no_structured_output
    return "would run" if lacking is None else f"would run, but no structured output: {lacking}"


def _table(role: str, facts: ModelFacts) -> object:
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
    return _named_rows(role, rows)


def _head_table(facts: HeadFacts) -> object:
    either = f", or {facts.other_hidden_states}: a probe tells" if facts.other_hidden_states else ""
    reach = f"; up to position {facts.context}" if facts.context else ""
    rows = {
        "directory": facts.directory,
        "trained on": facts.trained_on,
        "kind": f"{facts.kind}, in the layout of {facts.dialect}",
        "guesses": facts.guesses + reach,
        "hidden states": facts.hidden_states + either,
        "feature": f"{facts.feature_width} numbers a token, digest {facts.digest[:16]}",
        "vocabulary": facts.vocab_size,
        "weights": f"{facts.parameters} parameters, {facts.file_bytes / (1 << 20):.1f} MiB in {facts.files} files",
    }
    return _named_rows("head", rows)


def _named_rows(title: str, rows: Mapping[str, object]) -> object:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
    for name, value in rows.items():
        table.add_row(name, Text(one_line(str(value)), overflow="fold"))
    return table
