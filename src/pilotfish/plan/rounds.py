"""Rounds of speculation: tokens that one commits, and seconds that it takes, from those of forwards.

Leviathan et al. (arXiv 2211.17192) have the chain, SSD/Saguaro (arXiv 2603.03251) the cache of outcomes, SwiftSpec
(arXiv 2506.11309) the tree that is re-rooted.
"""

from __future__ import annotations

import math


def tokens_of_chain(acceptance: float, guesses: int) -> float:
    """Mean tokens of a round where each guess is accepted with the same chance (Leviathan, Equation 1). 0 to 1."""
    return float(sum(acceptance**k for k in range(guesses + 1)))


def chain_speedup(acceptance: float, guesses: int, cost: float) -> float:
    """Over plain decoding, where a forward of the draft costs `cost` of the target's, and verifying as much as one step
    (Leviathan, Theorem 3.8)."""
    return tokens_of_chain(acceptance, guesses) / (guesses * cost + 1)


def sync_round(verify: float, draft: float, forwards: int, fixed: float, exchange: float = 0.0) -> float:
    """Seconds where the target waits for `forwards` of the draft: guesses, and one more where the last guess's KV is
    computed as well. `exchange`: of questions and answers to a draft on other devices."""
    return forwards * draft + verify + fixed + exchange


def outcome_cache_round(verify: float, speculate: float, backup: float, hit: float, fixed: float) -> float:
    """Seconds where the draft prepares for each outcome while the target verifies, and a miss, with a chance of 1 -
    `hit`, waits for `backup` (SSD, Theorem 7)."""
    return max(verify, speculate) + (1 - hit) * backup + fixed


def speculate_seconds(answer: float, level: float, guesses: int, host: float) -> float:
    """Of SSD's draft: one forward over the guesses that it answered with, then a level for each guess over all prepared
    outcomes, each with `host` (its repository's ssd/engine/draft_runner.py)."""
    return answer + guesses * level + (guesses + 1) * host


def levels_hidden(verify: float, level: float, exchange: float = 0.0) -> int:
    """Levels that a draft has time for while the target verifies, at least one (SwiftSpec's rule for the depth)."""
    return max(1, math.floor((verify - exchange) / level))


def rerooted_round(verify: float, level: float, depth: int, survives: float, fixed: float) -> float:
    """Seconds where the tree grows `depth` levels while the target verifies. Where the committed token was not in it,
    with a chance of 1 - `survives`, it is begun anew, one level exposed."""
    return max(verify, depth * level) + (1 - survives) * level + fixed
