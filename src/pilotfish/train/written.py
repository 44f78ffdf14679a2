"""Text that the target writes itself: that is what a draft has to continue."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pilotfish.errors import InputError
from pilotfish.train.data import Tokens
from pilotfish.train.models import PROMPT, SAMPLED_ROWS, answer_prompts, continue_prompts
from pilotfish.train.passages import Passages


@dataclass(frozen=True)
class Written:
    tokens: Tokens  # [tokens], the prompt and what follows
    prompt: int  # tokens of the prompt


@dataclass(frozen=True)
class Writer:
    """Rows of `length` tokens at most, `SAMPLED_ROWS` at a time: answers to prompts or, where the passages have none,
    continuations of pieces of their text."""

    target: Any  # transformers' model
    length: int
    seed: int

    def write(self, passages: Passages, rows: int, temperature: float) -> Iterable[Written]:
        """At least `rows` of them. InputError for passages with too little text to begin with."""
        if not passages.prompts and len(passages.text) <= PROMPT:
            raise InputError(f"data: {len(passages.text)} tokens are too few; {PROMPT + 1} or more are needed")
        torch.manual_seed(self.seed)
        batch = self._answers if passages.prompts else self._continued
        for index in range(-(-rows // SAMPLED_ROWS)):
            yield from batch(passages, index, temperature)

    def _continued(self, passages: Passages, index: int, temperature: float) -> list[Written]:
        starts = np.random.default_rng((self.seed, 2, index)).integers(len(passages.text) - PROMPT, size=SAMPLED_ROWS)
        prompts = np.stack([passages.text[start : start + PROMPT] for start in starts])
        return [
            Written(row, PROMPT) for row in continue_prompts(self.target, prompts, self.length - PROMPT, temperature)
        ]

    def _answers(self, passages: Passages, index: int, temperature: float) -> list[Written]:
        """Of prompts the last half row: as many as there are, or the next so many."""
        prompts = [prompt[-self.length // 2 :] for prompt in sorted(passages.prompts, key=len)]
        chosen = [prompts[place % len(prompts)] for place in range(index * SAMPLED_ROWS, (index + 1) * SAMPLED_ROWS)]
        answered = answer_prompts(self.target, chosen, self.length, temperature)
        return [Written(row, len(prompt)) for row, prompt in zip(answered, chosen, strict=True)]
