from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from pilotfish.config.cache import made_once
from pilotfish.errors import ParameterError
from pilotfish.train.recipes import Recipe
from pilotfish.train.text.data import Tokens


def claim(run: Path, recipe: Recipe) -> None:
    """Another recipe's checkpoints would be resumed wrongly."""
    run.mkdir(parents=True, exist_ok=True)
    record = run / "recipe.json"
    if not record.exists():
        record.write_text(recipe.to_json())
    elif record.read_text() != recipe.to_json():
        raise ParameterError("run", str(run), "an empty directory, or one of the same recipe")


def cached(path: Path, make: Callable[[], Tokens]) -> Tokens:
    tokens: Tokens = np.load(made_once(path, lambda made: np.save(made, make())), mmap_mode="r")
    return tokens


def training_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ParameterError("device", name, "auto, cpu, or a CUDA device of this machine") from error
