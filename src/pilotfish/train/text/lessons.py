"""Batches for a draft: half the target's own text, which drafts continue, half people's, as varied as prompts are."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pilotfish.errors import InputError
from pilotfish.progress import Advance, PhaseProgress, PlannedPhase
from pilotfish.train.models import write_on
from pilotfish.train.recipes import TaughtRecipe
from pilotfish.train.taught_target import TaughtTarget
from pilotfish.train.text.data import Tokens, Windows
from pilotfish.train.text.passages import Passages
from pilotfish.train.trainer import cached

OWN_TEXT = "the target's text"  # the phase
PROMPT = 64  # tokens of a passage before each continuation
SAMPLED_ROWS = 64  # rows that the target writes at once
HELD_OUT_ROWS = 64  # that it writes at each temperature
OWN = "sampled.npy"  # in a run's folder: what it wrote


@dataclass(frozen=True)
class Written:
    tokens: Tokens  # [tokens], the prompt and what follows
    prompt: int  # tokens of the prompt


def plan_text(rows: int, length: int) -> PlannedPhase:
    return PlannedPhase(OWN_TEXT, -(-rows // SAMPLED_ROWS) * SAMPLED_ROWS * length)


@dataclass(frozen=True)
class Writer:
    target: Any  # transformers' model
    length: int
    seed: int
    progress: PhaseProgress

    def write(self, passages: Passages, rows: int, temperature: float) -> list[Written]:
        """At least `rows`. InputError for passages with too little text to begin with."""
        if not passages.prompts and len(passages.text) <= PROMPT:
            raise InputError(f"data: {len(passages.text)} tokens are too few; {PROMPT + 1} or more are needed")
        torch.manual_seed(self.seed)
        batch = self._answers if passages.prompts else self._continued
        written = list[Written]()
        with self.progress.phase(OWN_TEXT, plan_text(rows, self.length).units, "tokens") as advance:
            for index in range(-(-rows // SAMPLED_ROWS)):
                written += batch(passages, index, temperature, advance)
        return written

    def _continued(self, passages: Passages, index: int, temperature: float, advance: Advance) -> list[Written]:
        starts = np.random.default_rng((self.seed, 2, index)).integers(len(passages.text) - PROMPT, size=SAMPLED_ROWS)
        prompts = [passages.text[start : start + PROMPT] for start in starts]
        rows = write_on(self.target, prompts, self.length, temperature, advance)
        return [Written(row, PROMPT) for row in rows]

    def _answers(self, passages: Passages, index: int, temperature: float, advance: Advance) -> list[Written]:
        prompts = [prompt[-self.length // 2 :] for prompt in sorted(passages.prompts, key=len)]
        chosen = [prompts[place % len(prompts)] for place in range(index * SAMPLED_ROWS, (index + 1) * SAMPLED_ROWS)]
        answered = write_on(self.target, chosen, self.length, temperature, advance, to_the_end=True)
        return [Written(row, len(prompt)) for row, prompt in zip(answered, chosen, strict=True)]


@dataclass(frozen=True)
class Lessons:
    windows: tuple[Windows, ...]  # of a batch's rows
    held_out: Passages
    writer: Writer

    def written(self, temperature: float) -> list[Written]:
        return self.writer.write(self.held_out, HELD_OUT_ROWS, temperature)


def plan_lessons(recipe: TaughtRecipe, run: Path) -> PlannedPhase:
    return plan_text(0 if (run / OWN).exists() else _rows(recipe), recipe.sequence_length)


def write_lessons(
    texts: tuple[Passages, Passages], recipe: TaughtRecipe, target: TaughtTarget, run: Path, progress: PhaseProgress
) -> Lessons:
    """`texts`: to train on, and held out. InputError for too little data."""
    length, (training, held_out) = recipe.sequence_length, texts
    writer = Writer(target.module, length, recipe.seed, progress)
    if recipe.sampled_tokens:
        own = cached(run / OWN, lambda: joined_text(writer.write(training, _rows(recipe), recipe.temperature)))
        read_rows = recipe.batch_rows // 2 if len(training.text) >= 2 * length else 0
    else:
        own, read_rows = training.text, 0
    if len(own) < 2 * length:
        found = "the target wrote" if recipe.sampled_tokens else "its whole texts have"
        raise InputError(f"data: {found} {len(own)} tokens; rows of {length} need {2 * length} or more")
    parts = ((training.text, read_rows), (own, recipe.batch_rows - read_rows))
    windows = tuple(Windows(text, count, length, target.config.context, recipe.seed) for text, count in parts if count)
    return Lessons(windows, held_out, writer)


def _rows(recipe: TaughtRecipe) -> int:
    return -(-recipe.sampled_tokens // recipe.sequence_length)


def joined_text(written: Sequence[Written]) -> Tokens:
    return np.concatenate([row.tokens for row in written])
