"""`pilotfish train`: models from the user's own files."""

from __future__ import annotations

import dataclasses
import json as json_module
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotfish.cli.options import JsonOption, ThreadsOption
from pilotfish.config import available_cores
from pilotfish.errors import ParameterError

if TYPE_CHECKING:
    from pilotfish.train.evaluate import Evaluation
    from pilotfish.train.models import LlamaSize
    from pilotfish.train.recipe import PairRecipe

app = typer.Typer(help="Train models.")
SHAPE_HELP = "layers,hidden,heads,kv_heads,ffn"


@app.callback()
def _group() -> None:
    """Train models."""


@app.command("pair")
def pair(
    out: Annotated[Path, typer.Option(help="Where target/ and draft/ are written.")],
    run: Annotated[Path | None, typer.Option(help="Checkpoints to resume from; OUT/run.")] = None,
    source: Annotated[list[Path] | None, typer.Option(help="A file or directory of .py files. Repeatable.")] = None,
    held_out: Annotated[list[str] | None, typer.Option(help="A package never trained on. Repeatable.")] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Tokens of the byte-level BPE.")] = None,
    context: Annotated[int | None, typer.Option(help="Positions that the models serve.")] = None,
    target_shape: Annotated[str | None, typer.Option(metavar=SHAPE_HELP)] = None,
    draft_shape: Annotated[str | None, typer.Option(metavar=SHAPE_HELP)] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens of a training row.")] = None,
    batch_rows: Annotated[int | None, typer.Option(help="Rows of an optimizer step.")] = None,
    target_tokens: Annotated[int | None, typer.Option(help="Tokens the target trains on.")] = None,
    draft_tokens: Annotated[int | None, typer.Option(help="Tokens the draft is distilled on.")] = None,
    sampled_tokens: Annotated[int | None, typer.Option(help="Tokens the target writes for the draft.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="The target's peak rate.")] = None,
    draft_learning_rate: Annotated[float | None, typer.Option(help="The draft's peak rate.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, or a CUDA device.")] = "auto",
    threads: ThreadsOption = 0,
    json: JsonOption = False,
) -> None:
    """Train a target and its draft. Options left out take the recipe's values, which make `pycode`."""
    recipe = make_recipe(
        sources=tuple(source) if source else None,
        held_out=tuple(held_out) if held_out else None,
        seed=seed,
        vocab_size=vocab_size,
        context=context,
        target=parse_shape("target_shape", target_shape),
        draft=parse_shape("draft_shape", draft_shape),
        sequence_length=sequence_length,
        batch_rows=batch_rows,
        target_tokens=target_tokens,
        draft_tokens=draft_tokens,
        sampled_tokens=sampled_tokens,
        learning_rate=learning_rate,
        draft_learning_rate=draft_learning_rate,
        checkpoint_every=checkpoint_every,
    )
    result = _train(recipe, out, run or out / "run", device, threads)
    _print_result(dataclasses.asdict(result), json=json)


def make_recipe(**given: Any) -> PairRecipe:
    """The recipe with the values that are not None."""
    from pilotfish.train.recipe import PairRecipe

    return PairRecipe(**{field: value for field, value in given.items() if value is not None})


def parse_shape(field: str, text: str | None) -> LlamaSize | None:
    """`6,512,8,2,1536` as layers, widths and heads."""
    from pilotfish.train.models import LlamaSize

    if text is None:
        return None
    try:
        return LlamaSize(*map(int, text.split(",")))
    except (TypeError, ValueError) as error:
        raise ParameterError(field, text, f"five integers {SHAPE_HELP}") from error


def _train(recipe: PairRecipe, out: Path, run: Path, device: str, threads: int) -> Evaluation:
    if not 0 <= threads <= 1024:
        raise ParameterError("threads", threads, "an integer 0 to 1024")
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from pilotfish.train.pair import train_pair

    torch.set_num_threads(threads or available_cores())
    console = Console(stderr=True)
    with Progress(console=console, redirect_stdout=False, disable=not console.is_terminal) as progress:
        return train_pair(recipe, out, run, progress, device)


def _print_result(figures: dict[str, float], *, json: bool) -> None:
    if json:
        sys.stdout.write(json_module.dumps(figures) + "\n")
        return
    for name, value in figures.items():
        sys.stdout.write(f"{name.replace('_', ' '):<20} {value:.3f}\n")
