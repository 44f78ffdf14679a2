from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotfish.cli.options import JsonOption
from pilotfish.cli.show import print_json
from pilotfish.command import Given, taking
from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import available_cores
from pilotfish.engine.pairs.directories import model_directory
from pilotfish.errors import ParameterError
from pilotfish.options import Option, options_of, pick
from pilotfish.progress import PhaseProgress
from pilotfish.train.recipes import DistilRecipe, LlamaSize, PairRecipe, Recipe, head_options, head_recipe

if TYPE_CHECKING:  # imports torch
    from pilotfish.train.distil import Redistillation

app = typer.Typer(help="Train models.")

HOW = [
    Option("run", Path, None, "Checkpoints to resume from, and curves.", extra={"shown": "OUT/run"}),
    Option("device", str, "auto", "auto, cpu, or a CUDA device."),
    *pick(EngineConfig, "threads"),
]
#: Default accepted tokens a step that a new draft must gain.
MARGIN = 0.05
Target = Annotated[Path, typer.Option(help="The model that is to be guessed: a directory, or a GGUF file.")]


@app.command("pair")
@taking(pick(PairRecipe), HOW)
def pair(
    recipe: Given,
    how: Given,
    out: Annotated[Path, typer.Option(help="Where target/ and draft/ are written.")],
    json: JsonOption = False,
) -> None:
    """Train a target and its draft. The defaults make `pycode`."""
    _show(_trained("pair.train_pair", PairRecipe(**recipe), how, out), json=json)


@app.command("head")
@taking(head_options(), HOW)
def head(
    recipe: Given,
    how: Given,
    target: Target,
    kind: Annotated[str, typer.Option(help="eagle3, dspark, mtp or medusa.")],
    out: Annotated[Path, typer.Option(help="Where head/ is written.")],
    json: JsonOption = False,
) -> None:
    """Train a head that drafts from a target's hidden states."""
    _show(
        _trained("head.train_head", head_recipe(kind, target=model_directory("target", target), **recipe), how, out),
        json=json,
    )


@app.command("distil")
@taking(pick(DistilRecipe), HOW)
def distil(
    recipe: Given,
    how: Given,
    target: Target,
    draft: Annotated[str, typer.Option(help="A model's directory, or the shape of a new Llama.", metavar="DIR|SHAPE")],
    out: Annotated[Path, typer.Option(help="Where draft/ is written.")],
    margin: Annotated[
        float | None,
        typer.Option(min=0, show_default=str(MARGIN), help="With --from: accepted tokens a step that it must gain."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Teach a small language model what a target would say. With --from on a server's own traffic: exit code 1, and
    nothing written, where it is not accepted better than before."""
    shaped = re.fullmatch(r"[\d, -]+", draft) is not None
    start = {"shape": LlamaSize.parse("draft", draft)} if shaped else {"draft": Path(draft)}
    chosen = DistilRecipe(target=model_directory("target", target), **start, **recipe)
    if margin is not None and not chosen.captured:
        raise ParameterError("margin", margin, "none without --from")
    if not chosen.captured:
        return _show(_trained("distil.train_distil", chosen, how, out), json=json)
    least = MARGIN if margin is None else margin
    made = _trained("distil.redistil", chosen, how, out, least)
    _show_gain(made, json=json)
    raise typer.Exit(0 if made.better else 1)


def _trained(function: str, recipe: Recipe, how: Given, out: Path, *more: float) -> Any:
    options_of(EngineConfig)["threads"].check(how["threads"])
    module, _, name = function.partition(".")
    with PhaseProgress() as progress:
        with progress.phase("loading PyTorch"):
            import torch

            train = getattr(importlib.import_module(f"pilotfish.train.{module}"), name)
        torch.set_num_threads(how["threads"] or available_cores())
        return train(recipe, *more, out, how.get("run", out / "run"), progress, how["device"])


def _show(result: Any, *, json: bool) -> None:
    figures = dataclasses.asdict(result)
    if json:
        print_json(figures)
        return
    for name, value in figures.items():
        shown = " ".join(f"{one:.3f}" for one in (value if isinstance(value, tuple) else (value,)))
        sys.stdout.write(f"{name.replace('_', ' '):<24} {shown}\n")


def _show_gain(made: Redistillation, *, json: bool) -> None:
    present, new = dataclasses.asdict(made.present), dataclasses.asdict(made.new)
    if json:
        print_json({"present": present, "new": new, "gain": made.gain, "margin": made.margin, "better": made.better})
        return
    sys.stdout.write(f"{'':<24} {'present':>8} {'new':>8}\n")
    for name, value in present.items():
        sys.stdout.write(f"{name.replace('_', ' '):<24} {value:8.3f} {new[name]:8.3f}\n")
    if made.better:
        verdict = f"better by {made.gain:.3f} accepted tokens a step"
    else:
        needed = f"{made.gain:+.3f} accepted tokens a step, {made.margin:g} are needed"
        verdict = f"not better: {needed}; nothing was written"
    sys.stdout.write(f"{verdict}\n")
