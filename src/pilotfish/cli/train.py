"""`pilotfish train`: models from the user's own files."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pilotfish.cli.options import JsonOption
from pilotfish.cli.show import print_json
from pilotfish.command import Given, taking
from pilotfish.config import EngineConfig, available_cores
from pilotfish.errors import ParameterError
from pilotfish.options import Option, options_of, pick

if TYPE_CHECKING:  # imports torch
    from pilotfish.train.evaluate import Evaluation
    from pilotfish.train.models import LlamaSize
    from pilotfish.train.recipe import PairRecipe

app = typer.Typer(help="Train models.")
SHAPE_HELP = "layers,hidden,heads,kv_heads,ffn"


@app.callback()
def _group() -> None:
    """Train models."""


def _integer(name: str, help: str = "") -> Option:
    return Option(name, int, None, help)


#: Fields of PairRecipe, whose module imports torch. Those that are left out have the recipe's values.
RECIPE = [
    Option(
        "sources",
        tuple,
        None,
        "A file or directory of .py files.",
        entries=(Option("sources", Path),),
        extra={"names": ["--source"]},
    ),
    Option("held_out", tuple, None, "A package never trained on.", entries=(Option("held_out", str),)),
    _integer("seed"),
    _integer("vocab_size", "Tokens of the byte-level BPE."),
    _integer("context", "Positions that the models serve."),
    Option("target_shape", str, None, extra={"metavar": SHAPE_HELP}),
    Option("draft_shape", str, None, extra={"metavar": SHAPE_HELP}),
    _integer("sequence_length", "Tokens of a training row."),
    _integer("batch_rows", "Rows of an optimizer step."),
    _integer("target_tokens", "Tokens the target trains on."),
    _integer("draft_tokens", "Tokens the draft is distilled on."),
    _integer("sampled_tokens", "Tokens the target writes for the draft."),
    Option("learning_rate", float, None, "The target's peak rate."),
    Option("draft_learning_rate", float, None, "The draft's peak rate."),
    _integer("checkpoint_every", "Steps between checkpoints."),
]


@app.command("pair")
@taking(RECIPE, pick(EngineConfig, "threads"))
def pair(
    recipe: Given,
    engine: Given,
    out: Annotated[Path, typer.Option(help="Where target/ and draft/ are written.")],
    run: Annotated[Path | None, typer.Option(help="Checkpoints to resume from; OUT/run.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, or a CUDA device.")] = "auto",
    json: JsonOption = False,
) -> None:
    """Train a target and its draft. Options left out take the recipe's values, which make `pycode`."""
    from pilotfish.train.recipe import PairRecipe

    sizes = {f"{role}_shape": recipe.pop(f"{role}_shape", None) for role in ("target", "draft")}
    for field, text in sizes.items():
        if text is not None:
            recipe[field.removesuffix("_shape")] = parse_shape(field, text)
    result = _train(PairRecipe(**recipe), out, run or out / "run", device, engine["threads"])
    _print_result(dataclasses.asdict(result), json=json)


def parse_shape(field: str, text: str) -> LlamaSize:
    """`6,512,8,2,1536` as layers, widths and heads."""
    from pilotfish.train.models import LlamaSize

    try:
        return LlamaSize(*map(int, text.split(",")))
    except (TypeError, ValueError) as error:
        raise ParameterError(field, text, f"five integers {SHAPE_HELP}") from error


def _train(recipe: PairRecipe, out: Path, run: Path, device: str, threads: int) -> Evaluation:
    options_of(EngineConfig)["threads"].check(threads)
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
        print_json(figures)
        return
    for name, value in figures.items():
        sys.stdout.write(f"{name.replace('_', ' '):<20} {value:.3f}\n")
