"""How good a pair is on held-out text: losses, how close the draft is, how often it would be accepted."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor
from transformers import LlamaForCausalLM

from pilotfish.train.corpus import Tokens
from pilotfish.train.models import for_training, logits
from pilotfish.train.recipe import PairRecipe
from pilotfish.train.sample import PROMPT, continue_prompts

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


@dataclass(frozen=True)
class _Scores:
    """Per position [rows, length]: losses, divergence, same likeliest token, overlap of distributions."""

    target_loss: Tensor
    draft_loss: Tensor
    divergence: Tensor
    agreement: Tensor
    overlap: Tensor


@torch.no_grad()
def evaluate(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    held_out: Tokens,
    recipe: PairRecipe,
    progress: Progress,
) -> Evaluation:
    """Score both models on rows of held-out text and on the target's continuations of held-out prompts."""
    bar = progress.add_task("evaluation", total=3)
    text = _score(target, draft, _rows(held_out, recipe.sequence_length + 1, ROWS))
    progress.advance(bar)
    behind = slice(PROMPT - 1, None)  # the scores of continued tokens alone
    overlaps = []
    for temperature in (0.0, 1.0):
        torch.manual_seed(recipe.seed)
        scores = _score(target, draft, _continuations(target, held_out, recipe, temperature))
        overlaps.append(scores.overlap if temperature else scores.agreement)
        progress.advance(bar)
    return Evaluation(
        target_loss=text.target_loss.mean().item(),
        draft_loss=text.draft_loss.mean().item(),
        divergence=text.divergence.mean().item(),
        agreement=text.agreement.mean().item(),
        greedy_acceptance=overlaps[0][:, behind].mean().item(),
        sampled_acceptance=overlaps[1][:, behind].mean().item(),
    )


def _continuations(target: LlamaForCausalLM, held_out: Tokens, recipe: PairRecipe, temperature: float) -> Tokens:
    prompts = torch.from_numpy(_rows(held_out, PROMPT, PROMPTS).astype(np.int64))
    target.set_attn_implementation("sdpa")
    count = min(CONTINUED, recipe.context - PROMPT)
    return continue_prompts(target, prompts, count, temperature)


def _rows(tokens: Tokens, length: int, count: int) -> Tokens:
    """Up to `count` rows [count, length], evenly spaced over the tokens."""
    starts = np.unique(np.linspace(0, len(tokens) - length, count).astype(int))
    return np.stack([tokens[start : start + length] for start in starts])


def _score(target: LlamaForCausalLM, draft: LlamaForCausalLM, rows: Tokens) -> _Scores:
    for model in (target, draft):
        for_training(model, model.device).eval()
    tokens = torch.from_numpy(rows.astype(np.int64)).to(target.device)
    parts = [_score_batch(target, draft, part) for part in torch.split(tokens, ROWS_AT_ONCE)]
    return _Scores(*(torch.cat([getattr(part, name) for part in parts]) for name in _Scores.__annotations__))


def _score_batch(target: LlamaForCausalLM, draft: LlamaForCausalLM, tokens: Tensor) -> _Scores:
    inputs, wanted = tokens[:, :-1], tokens[:, 1:]
    positions = torch.arange(inputs.shape[1], device=tokens.device).expand_as(inputs)
    first, second = (F.log_softmax(logits(model, inputs, positions), -1) for model in (target, draft))
    return _Scores(
        target_loss=-first.gather(-1, wanted[..., None])[..., 0],
        draft_loss=-second.gather(-1, wanted[..., None])[..., 0],
        divergence=(first.exp() * (first - second)).sum(-1),
        agreement=(first.argmax(-1) == second.argmax(-1)).float(),
        overlap=torch.minimum(first.exp(), second.exp()).sum(-1),
    )
