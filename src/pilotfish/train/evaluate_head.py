"""Held-out figures of a head, in float32: what of its chains a target accepts in text that it writes itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pilotfish.errors import InputError
from pilotfish.progress import Advance, PhaseProgress, PlannedPhase
from pilotfish.train.evaluate import EVALUATION
from pilotfish.train.heads.trainee import Trainee
from pilotfish.train.learning import Teacher
from pilotfish.train.text.lessons import HELD_OUT_ROWS, Lessons, Written, plan_text

SAMPLED_AT = 0.8


@dataclass(frozen=True)
class HeadEvaluation:
    """By depth: the share of tokens that are accepted where all before were. Tokens a step are those of a chain, the
    target's own after it included."""

    greedy_acceptance: tuple[float, ...]  # of likeliest tokens, in text written at temperature 0
    greedy_tokens_a_step: float
    sampled_acceptance: tuple[float, ...]  # of tokens sampled at temperature 0.8, in text written so
    sampled_tokens_a_step: float


def plan_head_evaluation(length: int) -> list[PlannedPhase]:
    text = plan_text(HELD_OUT_ROWS, length)
    return [text, text, PlannedPhase(EVALUATION, 2 * text.units / length)]


@torch.no_grad()
def evaluate_head(
    trainee: Trainee, teacher: Teacher, lessons: Lessons, depth: int, progress: PhaseProgress
) -> HeadEvaluation:
    trainee.eval()
    texts = {temperature: _long_rows(lessons, temperature, depth) for temperature in (0.0, SAMPLED_AT)}
    figures: list[Any] = []
    with progress.phase(EVALUATION, sum(map(len, texts.values())), "rows") as advance:
        for temperature, rows in texts.items():
            shares = torch.cat([_shares(trainee, teacher, row, depth, temperature, advance) for row in rows])
            figures += [tuple(shares.mean(0).tolist()), 1 + shares.cumprod(1).sum(1).mean().item()]
    return HeadEvaluation(*figures)


def _long_rows(lessons: Lessons, temperature: float, depth: int) -> list[Written]:
    rows = [row for row in lessons.written(temperature) if len(row.tokens) > row.prompt + depth]
    if not rows:
        raise InputError("data: the target ends held-out texts at once; longer ones are needed")
    return rows


def _shares(
    trainee: Trainee, teacher: Teacher, row: Written, depth: int, temperature: float, advance: Advance
) -> Tensor:
    """float32 [starts, depth]: the chance that each guess below each token of a continuation is accepted."""
    tokens = torch.from_numpy(row.tokens.astype(np.int64))[None].to(teacher.target.device)
    length = tokens.shape[1]
    places = torch.arange(1, length - depth + 1, device=tokens.device)[None]
    positions = torch.arange(length, device=tokens.device)[None]
    verdicts = teacher.judge(trainee, tokens, positions, places, temperature or 1.0)
    shares = torch.stack([each.overlap if temperature else each.agrees.float() for each in verdicts], -1)
    advance()
    return shares[0, row.prompt - 2 :]  # from below the last token of the prompt
