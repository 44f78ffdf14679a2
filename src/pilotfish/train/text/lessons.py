"""What a draft is taught on, in batches: half the target's own text, which is what a draft has to continue, and half
people's, which keeps contexts as varied as prompts are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pilotfish.errors import InputError, ParameterError
from pilotfish.progress import PhaseProgress, PlannedPhase
from pilotfish.train.run_folder import cached
from pilotfish.train.taught_recipe import TaughtRecipe
from pilotfish.train.taught_target import TaughtTarget
from pilotfish.train.text.data import TokenBatch, Tokens, Windows, mixed
from pilotfish.train.text.passages import Passages, read_passages
from pilotfish.train.text.written import Writer, Written, plan_text
from pilotfish.train.trainer import Schedule

HELD_OUT_ROWS = 64  # that the target writes at each temperature
OWN = "sampled.npy"  # in a run's folder: what the target wrote


@dataclass(frozen=True)
class Texts:
    training: Passages
    held_out: Passages


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
        return self.writer.write(self.held_out, HELD_OUT_ROWS, temperature)


def schedule_of(recipe: TaughtRecipe) -> Schedule:
    return Schedule(recipe.tokens, recipe.tokens_per_step, recipe.learning_rate, recipe.checkpoint_every)


def read_texts(recipe: TaughtRecipe, target: TaughtTarget, progress: PhaseProgress) -> Texts:
    """InputError or ParameterError for data that is none, and rows beyond the target's context."""
    length, context = recipe.sequence_length, target.config.context
    if length > context:
        raise ParameterError("sequence_length", length, f"at most the target's context, {context}")
    with progress.phase("reading the text"):
        return Texts(*read_passages(recipe, target.tokenizer))


def plan_lessons(recipe: TaughtRecipe, run: Path) -> PlannedPhase:
    """What the target has still to write."""
    return plan_text(0 if (run / OWN).exists() else _rows(recipe), recipe.sequence_length)


def plan_held_out(length: int) -> PlannedPhase:
    """What it writes at a temperature for an evaluation."""
    return plan_text(HELD_OUT_ROWS, length)


def write_lessons(
    texts: Texts, recipe: TaughtRecipe, target: TaughtTarget, run: Path, progress: PhaseProgress
) -> Lessons:
    """InputError for data that is too little."""
    length, training = recipe.sequence_length, texts.training
    writer = Writer(target.module, length, recipe.seed, progress)
    own = cached(run / OWN, lambda: _flat(writer.write(training, _rows(recipe), recipe.temperature)))
    read_rows = recipe.batch_rows // 2 if len(training.text) >= 2 * length else 0
    if len(own) < 2 * length:
        raise InputError(f"data: the target wrote {len(own)} tokens; rows of {length} need {2 * length} or more")
    parts = ((training.text, read_rows), (own, recipe.batch_rows - read_rows))
    windows = tuple(Windows(text, count, length, target.config.context, recipe.seed) for text, count in parts if count)
    return Lessons(windows, texts.held_out, writer)


def _rows(recipe: TaughtRecipe) -> int:
    return -(-recipe.sampled_tokens // recipe.sequence_length)


def _flat(written: Sequence[Written]) -> Tokens:
    """[tokens], end to end."""
    return np.concatenate([row.tokens for row in written])
