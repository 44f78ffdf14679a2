"""Shared-noise sampling on tensors (design: y = argmax(l + g), core/noise.py for g).

Order: bias, penalties and exclusions (`logit_edits`), softmax(logits / T), min-p, top-k, top-p, as vLLM has it.
All in float64 and row by row, so that a row's token does not depend on the rows beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pilotfish.core.logit_rules import LogitEdits
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.model import native
from pilotfish.model.logit_edits import edited

#: Below it logits / T would swallow the noise, then overflow; the arg max has all the mass long before.
MIN_TEMPERATURE = 1e-12


@dataclass(frozen=True)
class RowSampling:
    """How one row's token is drawn: the request's parameters and seed, the index of the token, and what its path
    does to the logits."""

    params: SamplingParams
    seed: int
    position: int  # index in the sequence, prompt included, of the token that the row gives
    edits: LogitEdits | None = None


def sample(logits: torch.Tensor, rows: Sequence[RowSampling]) -> list[int]:
    """The target's token after each row. logits float32 or float64 [rows, vocab]."""
    logits = edited_rows(logits, rows)
    if all(row.params.greedy for row in rows):
        return greedy(logits).tolist()
    scores = filtered(logits, [row.params for row in rows])
    _, tokens = perturbed_topk(scores, rows, 1)
    chosen = tokens[:, 0].tolist()
    if any(row.params.greedy for row in rows):
        best = greedy(logits).tolist()
        chosen = [b if row.params.greedy else c for row, b, c in zip(rows, best, chosen, strict=True)]
    return chosen


def non_finite_rows(logits: torch.Tensor) -> list[int]:
    """Rows of raw logits [rows, vocab] that hold NaN or infinity. One sum, where there are none."""
    if math.isfinite(logits.sum().item()):
        return []
    found: list[int] = (~logits.isfinite().all(dim=-1)).nonzero()[:, 0].tolist()
    return found


def without_rows(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """The logits with these rows all 0, so that sampling can pass over them."""
    mask = torch.zeros(len(logits), dtype=torch.bool)
    mask[list(rows)] = True
    return logits.masked_fill(mask.to(logits.device)[:, None], 0.0)


def edited_rows(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """`logit_edits.edited` with each row's own edits."""
    return edited(logits, [row.edits for row in rows], [row.params for row in rows])


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Arg max, the lowest id on ties (which torch.argmax documents). int64 [rows]."""
    return logits.argmax(dim=-1)


def filtered(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """l of the module's docstring up to a constant per row; -inf where a filter excludes. float64."""
    temperatures = _column([1.0 if p.greedy else max(p.temperature, MIN_TEMPERATURE) for p in params], logits)
    floors = _column([math.log(p.min_p) if p.min_p else -math.inf for p in params], logits)
    top_k = torch.tensor([p.top_k for p in params], device=logits.device)[:, None]
    top_p = _column([p.top_p for p in params], logits)
    if logits.device.type == "cpu" and native.kernels_loaded():
        scores: torch.Tensor = torch.ops.pilotfish.filter_logits(logits, temperatures, floors, top_k, top_p)
        return scores
    return filtered_reference(logits, temperatures, floors, top_k, top_p)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def filtered_reference(
    logits: torch.Tensor,  # [rows, vocab]
    temperatures: torch.Tensor,  # float64 [rows, 1], as all below but top_k
    floors: torch.Tensor,
    top_k: torch.Tensor,  # int64 [rows, 1]
    top_p: torch.Tensor,
) -> torch.Tensor:
    """The same in torch operations, for any device."""
    scores = logits.double() / temperatures
    scores = scores.masked_fill(scores.isnan(), -torch.inf)
    if (floors > -torch.inf).any():
        scores = scores.masked_fill(scores < scores.amax(dim=-1, keepdim=True) + floors, -torch.inf)
    if (top_k > 0).any():
        scores = _keep_top_k(scores, top_k)
    return _keep_top_p(scores, top_p) if (top_p < 1).any() else scores


def _keep_top_k(scores: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    vocab = scores.shape[-1]
    kept = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab)
    ranked = scores.topk(int(kept.max()), dim=-1).values
    smallest = ranked.gather(1, kept - 1)
    return scores.masked_fill(scores < smallest, -torch.inf)  # equals of the k-th stay


def _keep_top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    probs = ranked.softmax(dim=-1)
    before = torch.nn.functional.pad(probs.cumsum(dim=-1)[:, :-1], (1, 0))  # mass above: the first always stays
    drop = (before >= top_p) & (top_p < 1)
    return scores.masked_fill(drop.scatter(1, order, drop), -torch.inf)


def perturbed_topk(scores: torch.Tensor, rows: Sequence[RowSampling], k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best tokens of each row by score + noise: values float64 [rows, k] descending, ids int64."""
    seeds = torch.tensor([_signed(row.seed) for row in rows])
    positions = torch.tensor([row.position for row in rows])
    if scores.device.type == "cpu" and native.kernels_loaded():
        values, tokens = torch.ops.pilotfish.perturbed_topk(scores, seeds, positions, k)
        return values, tokens
    return perturbed_topk_reference(scores, seeds.to(scores.device), positions.to(scores.device), k)


def _signed(seed: int) -> int:
    """The int64 of the same bits."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def perturbed_topk_reference(
    scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in torch operations, for any device. Ties go to the lower id (a stable sort)."""
    perturbed = scores + gumbel(seeds, positions, scores.shape[-1])
    values, tokens = perturbed.sort(dim=-1, descending=True, stable=True)
    return values[:, :k], tokens[:, :k]


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """core.noise.gumbel for many (seed, position) at once. int64 [rows] each -> float64 [rows, vocab]."""
    low = 0xFFFFFFFF
    block = torch.arange((vocab_size + 3) // 4, device=seeds.device)[None, :]
    zero = torch.zeros_like(block)
    c0, c1, c2, c3 = (positions[:, None] & low) + zero, (positions[:, None] >> 32) + zero, block, zero
    key0, key1 = seeds[:, None] & low, (seeds[:, None] >> 32) & low
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # int64 wraps: the low 64 bits are right
        c0, c1, c2, c3 = (
            ((product1 >> 32) & low) ^ c1 ^ key0,
            product1 & low,
            ((product0 >> 32) & low) ^ c3 ^ key1,
            product0 & low,
        )
        key0, key1 = (key0 + 0x9E3779B9) & low, (key1 + 0xBB67AE85) & low
    words = torch.stack((c0, c1, c2, c3), dim=-1).flatten(1)[:, :vocab_size]
    return -torch.log(-torch.log((words.double() + 0.5) / 2.0**32))
