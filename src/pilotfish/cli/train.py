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
from pilotfish.options import options_of, pick, unset
from pilotfish.train.recipe import PairRecipe

if TYPE_CHECKING:  # imports torch
    from pilotfish.train.evaluate import Evaluation

app = typer.Typer(help="Train models.", callback=lambda: None)  # a group, though of one command


@app.command("pair")
@taking(unset(pick(PairRecipe)), pick(EngineConfig, "threads"))
def pair(
    recipe: Given,
    engine: Given,
    out: Annotated[Path, typer.Option(help="Where target/ and draft/ are written.")],
    run: Annotated[Path | None, typer.Option(help="Checkpoints to resume from; OUT/run.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, or a CUDA device.")] = "auto",
    json: JsonOption = False,
) -> None:
    """Train a target and its draft. Options left out take the recipe's values, which make `pycode`."""
    options_of(EngineConfig)["threads"].check(engine["threads"])
    result = _train(PairRecipe(**recipe), out, run or out / "run", device, engine["threads"])
    figures = dataclasses.asdict(result)
    if json:
        print_json(figures)
        return
    for name, value in figures.items():
        sys.stdout.write(f"{name.replace('_', ' '):<20} {value:.3f}\n")


def _train(recipe: PairRecipe, out: Path, run: Path, device: str, threads: int) -> Evaluation:
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from pilotfish.train.pair import train_pair

    torch.set_num_threads(threads or available_cores())
    console = Console(stderr=True)
    with Progress(console=console, redirect_stdout=False, disable=not console.is_terminal) as progress:
        return train_pair(recipe, out, run, progress, device)
