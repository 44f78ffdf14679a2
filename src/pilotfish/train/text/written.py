"""Text that the target writes itself: that is what a draft has to continue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pilotfish.errors import InputError
from pilotfish.progress import Advance, PhaseProgress, PlannedPhase
from pilotfish.train.models import OWN_TEXT, PROMPT, SAMPLED_ROWS, answer_prompts, continue_prompts
from pilotfish.train.text.data import Tokens
from pilotfish.train.text.passages import Passages


@dataclass(frozen=True)
class Written:
    tokens: Tokens  # [tokens], the prompt and what follows
    prompt: int  # tokens of the prompt


def plan_text(rows: int, length: int) -> PlannedPhase:
    """Rows are written `SAMPLED_ROWS` at a time; prompts count."""
    return PlannedPhase(OWN_TEXT, -(-rows // SAMPLED_ROWS) * SAMPLED_ROWS * length)


@dataclass(frozen=True)
class Writer:
    """Rows of `length` tokens at most, `SAMPLED_ROWS` at a time: answers to prompts or, where the passages have none,
    continuations of pieces of their text."""

    target: Any  # transformers' model
    length: int
    seed: int
    progress: PhaseProgress

    def write(self, passages: Passages, rows: int, temperature: float) -> list[Written]:
        """At least `rows` of them. InputError for passages with too little text to begin with."""
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
        prompts = np.stack([passages.text[start : start + PROMPT] for start in starts])
        rows = continue_prompts(self.target, prompts, self.length - PROMPT, temperature, advance)
        return [Written(row, PROMPT) for row in rows]

    def _answers(self, passages: Passages, index: int, temperature: float, advance: Advance) -> list[Written]:
        """Of prompts the last half row: as many as there are, or the next so many."""
        prompts = [prompt[-self.length // 2 :] for prompt in sorted(passages.prompts, key=len)]
        chosen = [prompts[place % len(prompts)] for place in range(index * SAMPLED_ROWS, (index + 1) * SAMPLED_ROWS)]
        answered = answer_prompts(self.target, chosen, self.length, temperature, advance)
        return [Written(row, len(prompt)) for row, prompt in zip(answered, chosen, strict=True)]
