"""How well a draft guesses in captured outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pilotfish.progress import PhaseProgress, PlannedPhase
from pilotfish.train.models import EVALUATION, predict
from pilotfish.train.text.captured import CapturedText

#: Outputs that are scored, spread evenly.
SCORED = 128
#: Guesses of a chain.
CHAIN = 4


@dataclass(frozen=True)
class CapturedEvaluation:
    """Figures on outputs that training never saw, token by token; losses and divergence in nats a token."""

    target_loss: float
    draft_loss: float
    divergence: float  # KL(target ‖ draft)
    agreement: float  # share of tokens where both find the same one likeliest
    acceptance: float  # chance that a guess is accepted, at the request's temperature
    accepted_a_step: float  # expected of a chain of CHAIN guesses, below any token of an output


def plan_captured_evaluation(texts: Sequence[CapturedText]) -> PlannedPhase:
    return PlannedPhase(EVALUATION, min(len(texts), SCORED))


@torch.no_grad()
def evaluate_captured(
    target: Any, draft: Any, texts: Sequence[CapturedText], length: int, progress: PhaseProgress
) -> CapturedEvaluation:
    """Of an output its first `length` tokens."""
    places = np.unique(np.linspace(0, len(texts) - 1, SCORED).astype(int))
    draft.eval()
    figures = []
    with progress.phase(EVALUATION, len(places), "outputs") as advance:
        for place in places:
            figures.append(_figures(target, draft, texts[place], length))
            advance()
    return CapturedEvaluation(*torch.cat(figures).mean(0).tolist())


def _figures(target: Any, draft: Any, text: CapturedText, length: int) -> Tensor:
    """float32 [tokens of the output, fields of CapturedEvaluation]."""
    tokens = torch.from_numpy(text.tokens[: text.prompt + length].astype(np.int64))[None].to(target.device)
    judged, guessed = (predict(model, tokens)[0, text.prompt - 1 :] for model in (target, draft))
    first, second = F.log_softmax(judged, -1), F.log_softmax(guessed, -1)
    said = tokens[0, text.prompt :, None]
    agreement = (first.argmax(-1) == second.argmax(-1)).float()
    chances = agreement
    if text.temperature:
        at = text.temperature
        chances = torch.minimum(F.softmax(judged / at, -1), F.softmax(guessed / at, -1)).sum(-1)
    return torch.stack(
        (
            -first.gather(-1, said)[:, 0],
            -second.gather(-1, said)[:, 0],
            (first.exp() * (first - second)).sum(-1),
            agreement,
            chances,
            accepted_of_chains(chances),
        ),
        -1,
    )


def accepted_of_chains(chances: Tensor) -> Tensor:
    """[tokens]: how many guesses of a chain that begins with each token are accepted, one after the other, where
    `chances` [tokens] are those of each; none is beyond the last one."""
    following = F.pad(chances, (0, CHAIN - 1)).unfold(0, CHAIN, 1)
    return following.cumprod(1).sum(1)
