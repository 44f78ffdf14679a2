"""What a draft is taught on, in batches: half the target's own text, which is what a draft has to continue, and half
people's, which keeps contexts as varied as prompts are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.progress import Progress

from pilotfish.errors import InputError, ParameterError
from pilotfish.train.data import TokenBatch, Tokens, Windows, mixed
from pilotfish.train.passages import Passages, read_passages
from pilotfish.train.run_folder import cached
from pilotfish.train.taught_recipe import TaughtRecipe
from pilotfish.train.taught_target import TaughtTarget
from pilotfish.train.trainer import Schedule
from pilotfish.train.written import Writer, Written

HELD_OUT_ROWS = 64  # that the target writes at each temperature


@dataclass(frozen=True)
class Lessons:
    windows: tuple[Windows, ...]  # of a batch's rows
    held_out: Passages
    writer: Writer

    def batch(self, step: int) -> TokenBatch:
        return mixed(self.windows, step)

    @property
    def text(self) -> Tokens:
        """All of it, [tokens]."""
        return np.concatenate([windows.tokens for windows in self.windows])

    def written(self, temperature: float) -> list[Written]:
        """What the target makes of held-out passages."""
        return list(self.writer.write(self.held_out, HELD_OUT_ROWS, temperature))


def schedule_of(recipe: TaughtRecipe) -> Schedule:
    return Schedule(recipe.tokens, recipe.tokens_per_step, recipe.learning_rate, recipe.checkpoint_every)


def read_lessons(recipe: TaughtRecipe, target: TaughtTarget, run: Path, progress: Progress) -> Lessons:
    """InputError or ParameterError for data that is too little or none, and rows beyond the target's context."""
    length, context = recipe.sequence_length, target.config.context
    if length > context:
        raise ParameterError("sequence_length", length, f"at most the target's context, {context}")
    training, held_out = read_passages(recipe, target.tokenizer)
    writer = Writer(target.module, length, recipe.seed)
    rows = -(-recipe.sampled_tokens // length)
    own = cached(run / "sampled.npy", lambda: _flat(writer.write(training, rows, recipe.temperature), rows, progress))
    read_rows = recipe.batch_rows // 2 if len(training.text) >= 2 * length else 0
    if len(own) < 2 * length:
        raise InputError(f"data: the target wrote {len(own)} tokens; rows of {length} need {2 * length} or more")
    parts = ((training.text, read_rows), (own, recipe.batch_rows - read_rows))
    windows = tuple(Windows(text, count, length, context, recipe.seed) for text, count in parts if count)
    return Lessons(windows, held_out, writer)


def _flat(written: Iterable[Written], rows: int, progress: Progress) -> Tokens:
    """[tokens], end to end."""
    bar = progress.track(written, total=rows, description="the target writes")
    return np.concatenate([row.tokens for row in bar])
