"""How far two tokenizers must agree so that token ids of one can be guesses for the other.

base     0 ................ 999     equal: the same tokens, merges, normalizer and pre-tokenizer
added    1000 <eos>  1001 <tool>    each may have some that the other lacks: they are never guessed
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

#: Added tokens that a target tells of; those beyond count as not shared.
MAX_ADDED = 4096
LONGEST_TOKEN = 1024


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256, in hex, of all that maps text to base ids; added tokens change nothing."""
    return hashlib.sha256(json.dumps(_base(tokenizer), sort_keys=True).encode()).hexdigest()


def _base(tokenizer: Any) -> dict[str, Any]:
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    return {key: parts.get(key) for key in ("model", "normalizer", "pre_tokenizer")}


def text_digest(tokenizer: Any) -> str:
    """SHA-256, in hex, of all that maps texts to ids and ids to texts, added tokens too."""
    text = tokenizer.backend_tokenizer.to_str()
    return hashlib.sha256(text[text.index('"added_tokens"') :].encode()).hexdigest()  # before it: how calls pad and cut


def added_tokens(tokenizer: Any) -> dict[int, str]:
    """Tokens beyond the base vocabulary by their ids, the lowest `MAX_ADDED`."""
    base = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    every = sorted(tokenizer.backend_tokenizer.get_added_tokens_decoder().items())
    added = {i: one.content for i, one in every if base.get(one.content) != i and len(one.content) <= LONGEST_TOKEN}
    return dict(list(added.items())[:MAX_ADDED])


def why_unequal(target: Any, draft: Any) -> str | None:
    """Why the ids of one tokenizer cannot be guesses for the other; None: they can."""
    vocabularies = (one.backend_tokenizer.get_vocab(with_added_tokens=False) for one in (target, draft))
    reason = difference(*vocabularies) or clash(added_tokens(target), added_tokens(draft))
    if reason is not None:
        return reason
    ours, theirs = ({**base["model"], **base} for base in (_base(target), _base(draft)))
    differing = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
    known = [name for name in ("merges", "normalizer", "pre_tokenizer") if name in differing]
    return f"their {' and '.join(known) or 'models'} differ" if differing else None


def why_ids_differ(one: Any, other: Any) -> str | None:
    """Why a text's ids of one tokenizer may mean something else to the other; None: they mean the same. Added tokens
    count too."""
    if (reason := why_unequal(one, other)) is not None:
        return reason
    ours, theirs = added_tokens(one), added_tokens(other)
    differing = sorted({i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i)})
    return f"only one of them has the added token {differing[0]}; {len(differing)} differ" if differing else None


def difference(target: Mapping[str, int], draft: Mapping[str, int]) -> str | None:
    """Where two maps of tokens to ids differ: the first token, its ids, and how many there are. None: nowhere."""
    differing = {token for token in target.keys() | draft.keys() if target.get(token) != draft.get(token)}
    return _told(differing, target, draft) if differing else None


def clash(target: Mapping[int, str], draft: Mapping[int, str]) -> str | None:
    """The same for added tokens by their ids, where one may have tokens that the other lacks: an id that both have
    stands for one token, a token that both have stands at one id."""
    ours, theirs = ({token: i for i, token in added.items()} for added in (target, draft))
    moved = {token for token in ours.keys() & theirs.keys() if ours[token] != theirs[token]}
    taken = {token for i in target.keys() & draft.keys() if target[i] != draft[i] for token in (target[i], draft[i])}
    return _told(moved | taken, ours, theirs) if moved or taken else None


def _told(tokens: set[str], target: Mapping[str, int], draft: Mapping[str, int]) -> str:
    first = min(tokens, key=lambda token: (target.get(token, draft.get(token)), token))
    shown, count = repr(first[:64]), len(tokens)
    where = [f"id {ids[first]}" if first in ids else "no id" for ids in (target, draft)]
    return f"token {shown} has {where[0]} in the target and {where[1]} in the draft; {count} tokens differ"
