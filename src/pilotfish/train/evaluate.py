"""Held-out figures of a pair: losses, divergence of the draft, acceptance of its tokens."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor
from transformers import LlamaForCausalLM

from pilotfish.train.data import Tokens
from pilotfish.train.models import PROMPT, continue_prompts, predict

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


@torch.no_grad()
def evaluate(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, held_out: Tokens, length: int, seed: int, progress: Progress
) -> Evaluation:
    """Score both models on rows of held-out text, of `length` tokens at most, and on the target's continuations of
    held-out prompts."""
    bar = progress.add_task("evaluation", total=3)
    scores = _score(target, draft, _rows(held_out, length + 1, ROWS))
    figures = {name: scores[name].mean().item() for name in ("target_loss", "draft_loss", "divergence", "agreement")}
    progress.advance(bar)
    prompts, count = _rows(held_out, PROMPT, PROMPTS), min(CONTINUED, target.config.max_position_embeddings - PROMPT)
    for name, temperature, score in (("greedy_acceptance", 0.0, "agreement"), ("sampled_acceptance", 1.0, "overlap")):
        torch.manual_seed(seed)
        scores = _score(target, draft, continue_prompts(target, prompts, count, temperature))
        figures[name] = scores[score][:, PROMPT - 1 :].mean().item()  # of continued tokens alone
        progress.advance(bar)
    return Evaluation(**figures)


def _rows(tokens: Tokens, length: int, count: int) -> Tokens:
    """Up to `count` rows [count, length], evenly spaced over the tokens."""
    starts = np.unique(np.linspace(0, len(tokens) - length, count).astype(int))
    return np.stack([tokens[start : start + length] for start in starts])


def _score(target: LlamaForCausalLM, draft: LlamaForCausalLM, rows: Tokens) -> dict[str, Tensor]:
    """Figures of each position, [rows, length]."""
    tokens = torch.from_numpy(rows.astype(np.int64)).to(target.device)
    parts = [_score_batch(target, draft, part) for part in torch.split(tokens, ROWS_AT_ONCE)]
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
