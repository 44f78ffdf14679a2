"""Held-out figures of a pair: losses, divergence of the draft, acceptance of its tokens."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from pilotfish.progress import Advance, PhaseProgress, PlannedPhase
from pilotfish.train.models import EVALUATION, OWN_TEXT, PROMPT, continue_prompts, predict
from pilotfish.train.text.data import Tokens

ROWS = 128  # held-out rows scored, spread evenly over the held-out text
ROWS_AT_ONCE = 8
PROMPTS = 32  # held-out prompts that the target continues
CONTINUED = 128  # tokens of each continuation


@dataclass(frozen=True)
class Evaluation:
    """Figures on text that training never saw; losses and divergence in nats a token."""

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
def evaluate(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    held_out: Tokens,
    length: int,
    seed: int,
    progress: PhaseProgress,
) -> Evaluation:
    """Score both models on rows of held-out text, of `length` tokens at most, and on the target's continuations of
    held-out prompts."""
    read, prompts = _rows(held_out, length + 1, ROWS), _rows(held_out, PROMPT, PROMPTS)
    greedy, sampled = _continued(target, prompts, seed, progress)
    with progress.phase(EVALUATION, len(read) + 2 * len(prompts), "rows") as advance:
        scores, of_greedy, of_sampled = (_score(target, draft, rows, advance) for rows in (read, greedy, sampled))
    figures = {name: scores[name].mean().item() for name in ("target_loss", "draft_loss", "divergence", "agreement")}
    continued = slice(PROMPT - 1, None)
    figures["greedy_acceptance"] = of_greedy["agreement"][:, continued].mean().item()
    figures["sampled_acceptance"] = of_sampled["overlap"][:, continued].mean().item()
    return Evaluation(**figures)


def _continued(target: LlamaForCausalLM, prompts: Tokens, seed: int, progress: PhaseProgress) -> list[Tokens]:
    """At temperatures 0 and 1."""
    count, written = min(CONTINUED, target.config.max_position_embeddings - PROMPT), list[Tokens]()
    with progress.phase(OWN_TEXT, 2 * len(prompts) * (PROMPT + count), "tokens") as advance:
        for temperature in (0.0, 1.0):
            torch.manual_seed(seed)
            written.append(continue_prompts(target, prompts, count, temperature, advance))
    return written


def _rows(tokens: Tokens, length: int, count: int) -> Tokens:
    """Up to `count` rows [count, length], evenly spaced over the tokens."""
    starts = np.unique(np.linspace(0, len(tokens) - length, count).astype(int))
    return np.stack([tokens[start : start + length] for start in starts])


def _score(target: LlamaForCausalLM, draft: LlamaForCausalLM, rows: Tokens, advance: Advance) -> dict[str, Tensor]:
    """Figures of each position, [rows, length]."""
    tokens = torch.from_numpy(rows.astype(np.int64)).to(target.device)
    parts = []
    for part in torch.split(tokens, ROWS_AT_ONCE):
        parts.append(_score_batch(target, draft, part))
        advance(len(part))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _score_batch(target: LlamaForCausalLM, draft: LlamaForCausalLM, tokens: Tensor) -> dict[str, Tensor]:
    targets = tokens[:, 1:, None]
    first, second = (F.log_softmax(predict(model.eval(), tokens), -1) for model in (target, draft))
    return {
        "target_loss": -first.gather(-1, targets)[..., 0],
        "draft_loss": -second.gather(-1, targets)[..., 0],
        "divergence": (first.exp() * (first - second)).sum(-1),
        "agreement": (first.argmax(-1) == second.argmax(-1)).float(),
        "overlap": torch.minimum(first.exp(), second.exp()).sum(-1),
    }
