"""Tokens and seconds of a round of speculation. Chain: Leviathan et al. (arXiv 2211.17192); cache of outcomes:
SSD/Saguaro (arXiv 2603.03251); re-rooted tree: SwiftSpec (arXiv 2506.11309)."""

import math


def tokens_of_chain(acceptance: float, guesses: int) -> float:
    """Mean tokens of a round, each guess being accepted with the same chance, 0 to 1 (Leviathan, Equation 1)."""
    return float(sum(acceptance**k for k in range(guesses + 1)))


def chain_speedup(acceptance: float, guesses: int, cost: float) -> float:
    """Over plain decoding. `cost`: the draft's forward over the target's; verifying costs 1 (Leviathan, Thm. 3.8)."""
    return tokens_of_chain(acceptance, guesses) / (guesses * cost + 1)


def sync_round(verify: float, draft: float, forwards: int, fixed: float, exchange: float = 0.0) -> float:
    """Seconds; the target waits for `forwards` of the draft: one for each guess, and one more if the last guess's KV is
    computed too. `exchange`: messages to a draft on other devices."""
    return forwards * draft + verify + fixed + exchange


def outcome_cache_round(verify: float, speculate: float, backup: float, hit: float, fixed: float) -> float:
    """Seconds; the draft prepares for each outcome, and a miss (chance 1 - `hit`) waits for `backup` (SSD, Thm. 7)."""
    return max(verify, speculate) + (1 - hit) * backup + fixed


def speculate_seconds(answer: float, level: float, guesses: int, host: float) -> float:
    """Of SSD's draft: a forward over its answered guesses, then for each guess a level over all prepared outcomes, each
    with `host` (SSD's ssd/engine/draft_runner.py)."""
    return answer + guesses * level + (guesses + 1) * host


def levels_hidden(verify: float, level: float, exchange: float = 0.0) -> int:
    """Levels, at least one, that a draft grows while the target verifies (SwiftSpec's rule for the depth)."""
    return max(1, math.floor((verify - exchange) / level))


def rerooted_round(verify: float, level: float, depth: int, survives: float, fixed: float) -> float:
    """Seconds; the tree grows `depth` levels meanwhile. With a chance of 1 - `survives` it lacks the committed token
    and starts anew, with one level exposed."""
    return max(verify, depth * level) + (1 - survives) * level + fixed
