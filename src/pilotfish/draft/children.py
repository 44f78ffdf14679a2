"""Which tokens are likely to follow, by a draft model that mirrors the target's noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pilotfish.model.sampling import RowSampling, edited_rows, filtered, non_finite_rows, perturbed_topk, without_rows

#: b: spread of the target's log-probabilities about the draft's. With the bundled pair 0.35 and 0.5 had most
#: tokens accepted, 0.25, 0.7 and 1 fewer.
NOISE_SCALE = 0.5


@dataclass(frozen=True)
class Children:
    """The best tokens after each row, likeliest first."""

    tokens: NDArray[np.int64]  # [rows, k]
    log_chances: NDArray[np.float64]  # [rows, k], -inf where fewer than k tokens survive the filters

    def of(self, rows: slice) -> Children:
        return Children(self.tokens[rows], self.log_chances[rows])


def likely_children(logits: torch.Tensor, rows: Sequence[RowSampling], k: int) -> Children:
    """The k tokens (or as many as there are) that the target most likely *samples* after each row.

    They are the top of draft logits / T + g with the target's own noise g. A token's chance is
    softmax((log q / T + g) / b) over the k, at T = 0 its draft probability. logits float32 [rows, vocab]; nothing is
    likely after a row that is not finite.
    """
    broken = non_finite_rows(logits)
    if broken:
        children = likely_children(without_rows(logits, broken), rows, k)
        children.log_chances[broken] = -np.inf
        return children
    logits = edited_rows(logits, rows)
    k = min(k, logits.shape[1])
    greedy = [row.params.greedy for row in rows]
    if all(greedy):
        return _children(*logits.log_softmax(dim=-1).topk(k, dim=-1))
    scores, tokens = perturbed_topk(filtered(logits, [row.params for row in rows]), rows, k)
    chances = (scores / NOISE_SCALE).log_softmax(dim=-1)
    if any(greedy):
        plain, plain_tokens = logits.double().log_softmax(dim=-1).topk(k, dim=-1)
        chosen = torch.tensor(greedy, device=logits.device)[:, None]
        chances, tokens = torch.where(chosen, plain, chances), torch.where(chosen, plain_tokens, tokens)
    return _children(chances, tokens)


def _children(log_chances: torch.Tensor, tokens: torch.Tensor) -> Children:
    return Children(tokens.cpu().numpy(), log_chances.double().cpu().numpy())
