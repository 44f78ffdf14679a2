"""The vocabulary of a tokenizer, to be compared with another's."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pilotfish.core.vocabulary import LONGEST_TOKEN, MAX_ADDED, clash, difference


def tokenizer_digest(tokenizer: Any) -> str:
    """Equal for tokenizers that map the same text to the same ids, but for the tokens added to them; sha256 in hex."""
    return hashlib.sha256(json.dumps(_base(tokenizer), sort_keys=True).encode()).hexdigest()


def _base(tokenizer: Any) -> dict[str, Any]:
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    return {key: parts.get(key) for key in ("model", "normalizer", "pre_tokenizer")}


def added_tokens(tokenizer: Any) -> dict[int, str]:
    """Tokens beyond the base vocabulary by their ids, the lowest `MAX_ADDED`."""
    base = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    every = sorted(tokenizer.backend_tokenizer.get_added_tokens_decoder().items())
    added = {i: one.content for i, one in every if base.get(one.content) != i and len(one.content) <= LONGEST_TOKEN}
    return dict(list(added.items())[:MAX_ADDED])


def why_unequal(target: Any, draft: Any) -> str | None:
    """What keeps one tokenizer's ids from being guesses of the other's; None: nothing does."""
    vocabularies = (one.backend_tokenizer.get_vocab(with_added_tokens=False) for one in (target, draft))
    reason = difference(*vocabularies) or clash(added_tokens(target), added_tokens(draft))
    if reason is not None:
        return reason
    ours, theirs = _base(target), _base(draft)
    named = ("merges", "normalizer", "pre_tokenizer")
    ours, theirs = ({**base["model"], **base} for base in (ours, theirs))
    differing = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
    known = [name for name in named if name in differing]
    return f"their {' and '.join(known) or 'models'} differ" if differing else None
