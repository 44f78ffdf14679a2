"""Log-probabilities that are reported."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLogprobs:
    """Of one token, under the model's own distribution: raw logits, temperature 1, no filters."""

    token: int
    logprob: float
    rank: int  # 1: no token is likelier
    top: tuple[tuple[int, float], ...]  # the n likeliest tokens and their log-probabilities, likeliest first
