from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pilotfish.errors import InputError
from pilotfish.progress import Advance, PhaseProgress, PlannedPhase
from pilotfish.train.heads.trainee import Trainee
from pilotfish.train.models import predict, write_on
from pilotfish.train.taught_target import Teacher
from pilotfish.train.text.captured import CapturedText
from pilotfish.train.text.data import Tokens
from pilotfish.train.text.lessons import OWN_TEXT, PROMPT, Lessons, Written

EVALUATION = "evaluation"  # the phase
ROWS = 128  # held-out rows or outputs scored, spread evenly
ROWS_AT_ONCE = 8
PROMPTS = 32  # held-out prompts that the target continues
CONTINUED = 128  # tokens of each continuation
CHAIN = 4  # guesses of a chain, in captured outputs
SAMPLED_AT = 0.8  # the temperature at which heads are evaluated, beside 0


class Figures(NamedTuple):
    """Of both models at each position, [rows, length]; losses and divergence in nats."""

    target_loss: Tensor
    draft_loss: Tensor
    divergence: Tensor  # KL(target ‖ draft)
    agreement: Tensor  # 1 where both find the same token likeliest
    overlap: Tensor  # the chance that a guess is accepted, at a temperature


def _figures(target: Any, draft: Any, tokens: Tensor, temperature: float = 1.0) -> Figures:
    """tokens int64 [rows, length + 1]"""
    judged, guessed = (predict(model.eval(), tokens) for model in (target, draft))
    first, second, said = F.log_softmax(judged, -1), F.log_softmax(guessed, -1), tokens[:, 1:, None]
    overlap = agreement = (first.argmax(-1) == second.argmax(-1)).float()
    if temperature:
        overlap = torch.minimum(*(F.softmax(logits / temperature, -1) for logits in (judged, guessed))).sum(-1)
    own, other = (-chances.gather(-1, said)[..., 0] for chances in (first, second))
    return Figures(own, other, (first.exp() * (first - second)).sum(-1), agreement, overlap)


def _evenly(count: int, most: int) -> list[int]:
    places: list[int] = np.unique(np.linspace(0, count - 1, most).astype(int)).tolist()
    return places


@dataclass(frozen=True)
class Evaluation:
    """On text that training never saw; losses and divergence in nats a token."""

    target_loss: float
    draft_loss: float
    divergence: float  # KL(target ‖ draft) on held-out text
    agreement: float  # share of held-out positions where both find the same token likeliest
    greedy_acceptance: float  # share of the target's greedy tokens that are the draft's likeliest
    sampled_acceptance: float  # mean overlap of both distributions on text sampled at temperature 1


#: What `evaluate` does.
PLANNED = (
    PlannedPhase(OWN_TEXT, 2 * PROMPTS * (PROMPT + CONTINUED)),
    PlannedPhase(EVALUATION, ROWS + 2 * PROMPTS),
)


@torch.no_grad()
def evaluate(target: Any, draft: Any, held_out: Tokens, length: int, seed: int, progress: PhaseProgress) -> Evaluation:
    prompts, texts, scores = _rows(held_out, PROMPT, PROMPTS), [np.stack(_rows(held_out, length + 1, ROWS))], []
    longest = PROMPT + min(CONTINUED, target.config.max_position_embeddings - PROMPT)
    with progress.phase(OWN_TEXT, 2 * len(prompts) * longest, "tokens") as advance:
        for temperature in (0.0, 1.0):
            torch.manual_seed(seed)
            texts.append(np.stack(write_on(target, prompts, longest, temperature, advance)))
    with progress.phase(EVALUATION, sum(map(len, texts)), "rows") as advance:
        for text in texts:
            parts = []
            for tokens in torch.split(torch.from_numpy(text.astype(np.int64)).to(target.device), ROWS_AT_ONCE):
                parts.append(_figures(target, draft, tokens))
                advance(len(tokens))
            scores.append(Figures(*map(torch.cat, zip(*parts, strict=True))))
    read, greedy, sampled = scores
    continued = slice(PROMPT - 1, None)
    shares = greedy.agreement[:, continued], sampled.overlap[:, continued]
    return Evaluation(*(figure.mean().item() for figure in (*read[:4], *shares)))


def _rows(tokens: Tokens, length: int, count: int) -> list[Tokens]:
    return [tokens[start : start + length] for start in _evenly(len(tokens) - length + 1, count)]


@dataclass(frozen=True)
class CapturedEvaluation:
    """On outputs that training never saw, token by token; losses and divergence in nats a token."""

    target_loss: float
    draft_loss: float
    divergence: float  # KL(target ‖ draft)
    agreement: float  # share of tokens where both find the same one likeliest
    acceptance: float  # chance that a guess is accepted, at the request's temperature
    accepted_a_step: float  # expected of a chain of CHAIN guesses, below any token of an output


def plan_captured(texts: Sequence[CapturedText]) -> PlannedPhase:
    return PlannedPhase(EVALUATION, min(len(texts), ROWS))


@torch.no_grad()
def evaluate_captured(
    target: Any, draft: Any, texts: Sequence[CapturedText], length: int, progress: PhaseProgress
) -> CapturedEvaluation:
    places, figures = _evenly(len(texts), ROWS), []
    with progress.phase(EVALUATION, len(places), "outputs") as advance:
        for text in (texts[place] for place in places):
            tokens = torch.from_numpy(text.tokens[: text.prompt + length].astype(np.int64))[None].to(target.device)
            own = [each[0, text.prompt - 1 :] for each in _figures(target, draft, tokens, text.temperature)]
            figures.append(torch.stack((*own, accepted_of_chains(own[-1])), -1))
            advance()
    return CapturedEvaluation(*torch.cat(figures).mean(0).tolist())


def accepted_of_chains(chances: Tensor) -> Tensor:
    """[tokens]: guesses expected to be accepted of a chain below each token; `chances` [tokens] are each guess's."""
    following = F.pad(chances, (0, CHAIN - 1)).unfold(0, CHAIN, 1)
    return following.cumprod(1).sum(1)


@dataclass(frozen=True)
class HeadEvaluation:
    """By depth: the share of tokens that are accepted after accepted ones. Tokens a step count the target's own,
    too."""

    greedy_acceptance: tuple[float, ...]  # of likeliest tokens, in text written at temperature 0
    greedy_tokens_a_step: float
    sampled_acceptance: tuple[float, ...]  # of tokens sampled at temperature 0.8, in text written so
    sampled_tokens_a_step: float


@torch.no_grad()
def evaluate_head(
    trainee: Trainee, teacher: Teacher, lessons: Lessons, depth: int, progress: PhaseProgress
) -> HeadEvaluation:
    trainee.eval()
    texts = {temperature: lessons.written(temperature) for temperature in (0.0, SAMPLED_AT)}
    texts = {at: [row for row in rows if len(row.tokens) > row.prompt + depth] for at, rows in texts.items()}
    if not all(texts.values()):  # a chain has room in none
        raise InputError("data: the target ends held-out texts at once; longer ones are needed")
    figures: list[Any] = []
    with progress.phase(EVALUATION, sum(map(len, texts.values())), "rows") as advance:
        for temperature, rows in texts.items():
            shares = torch.cat([_shares(trainee, teacher, row, depth, temperature, advance) for row in rows])
            figures += [tuple(shares.mean(0).tolist()), 1 + shares.cumprod(1).sum(1).mean().item()]
    return HeadEvaluation(*figures)


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
