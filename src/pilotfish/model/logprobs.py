"""Log-probabilities of tokens under the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pilotfish.core.logprobs import TokenLogprobs

#: Rows at a time: a sorted vocabulary in float64 takes several times the memory of its logits.
SLICE = 16


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Of tokens[i] under row i, and of each row's `top` likeliest. logits [rows, vocab], raw. The rank counts tokens
    that are strictly likelier; equal ones in `top` stand in order of their ids."""
    slices = range(0, len(tokens), SLICE)
    return [e for at in slices for e in _of_slice(logits[at : at + SLICE], tokens[at : at + SLICE], top)]


def _of_slice(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    log_probs = logits.double().log_softmax(dim=-1)
    chosen = log_probs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = (log_probs > chosen).sum(dim=-1) + 1
    values, ids = log_probs.sort(dim=-1, descending=True, stable=True)
    values, ids = values[:, :top], ids[:, :top]
    rows = zip(tokens, chosen[:, 0].tolist(), ranks.tolist(), ids.tolist(), values.tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(best, best_values, strict=True)))
        for token, logprob, rank, best, best_values in rows
    ]
