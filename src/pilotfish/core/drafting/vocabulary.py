"""How far two tokenizers must agree so that token ids of one can be guesses for the other.

base     0 ................ 999     equal: the same tokens, merges, normalizer and pre-tokenizer
added    1000 <eos>  1001 <tool>    each may have some that the other lacks: they are never guessed
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

#: Added tokens that a target tells of; those beyond count as not shared.
MAX_ADDED = 4096
LONGEST_TOKEN = 1024
#: Attribute of a tokenizer that `leave_out` has changed: the back-end of all that its files have.
_WHOLE = "_pilotfish_whole_backend"


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256, in hex, of all that maps text to base ids; added tokens change nothing."""
    return hashlib.sha256(json.dumps(_base(tokenizer), sort_keys=True).encode()).hexdigest()


def _base(tokenizer: Any) -> dict[str, Any]:
    parts = json.loads(_whole(tokenizer).to_str())
    return {key: parts.get(key) for key in ("model", "normalizer", "pre_tokenizer")}


def text_digest(tokenizer: Any) -> str:
    """SHA-256, in hex, of all that maps texts to ids and back, added tokens too."""
    text = _whole(tokenizer).to_str()
    return hashlib.sha256(text[text.index('"added_tokens"') :].encode()).hexdigest()  # before it: how calls pad and cut


def added_tokens(tokenizer: Any) -> dict[int, str]:
    base = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    every = sorted(tokenizer.backend_tokenizer.get_added_tokens_decoder().items())
    added = {i: one.content for i, one in every if base.get(one.content) != i and len(one.content) <= LONGEST_TOKEN}
    return dict(list(added.items())[:MAX_ADDED])


def leave_out(tokenizer: Any, vocab_size: int) -> None:
    """Remove ids that a model of `vocab_size` embeddings lacks. Digests and comparisons stay those of its files."""
    backend = tokenizer.backend_tokenizer
    if backend.get_vocab_size(with_added_tokens=False) > vocab_size:
        described = without_ids_from(json.loads(backend.to_str()), vocab_size)
        tokenizer._tokenizer = type(backend).from_str(json.dumps(described))
    elif max(added := backend.get_added_tokens_decoder(), default=0) >= vocab_size:
        kept = (one for token, one in sorted(added.items()) if token < vocab_size)
        tokenizer._tokenizer = with_added(backend, kept)
    else:
        return
    setattr(tokenizer, _WHOLE, backend)


def _whole(tokenizer: Any) -> Any:
    return getattr(tokenizer, _WHOLE, tokenizer.backend_tokenizer)


def with_added(backend: Any, added: Iterable[Any]) -> Any:
    """The same with other added tokens, by their ids; shares the model, which takes seconds to read."""
    made = type(backend)(backend.model)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder", "encode_special_tokens"):
        setattr(made, name, getattr(backend, name))
    for special, tokens in groupby(added, key=lambda token: bool(token.special)):
        (made.add_special_tokens if special else made.add_tokens)(list(tokens))
    return made


def without_ids_from(described: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    added = [token for token in described["added_tokens"] if token["id"] < vocab_size]
    return {**described, "model": _model_without(described["model"], vocab_size), "added_tokens": added}


def _model_without(model: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    entries = model["vocab"]
    if not isinstance(entries, dict):  # pieces and their scores, by id
        return {**model, "vocab": entries[:vocab_size]}
    kept = {piece: token for piece, token in entries.items() if token < vocab_size}
    if len(kept) == len(entries) or "merges" not in model:
        return {**model, "vocab": kept}
    prefix = model["continuing_subword_prefix"] or ""
    merges = [(a, b) for a, b in model["merges"] if {a, b, a + b.removeprefix(prefix)} <= kept.keys()]
    return {**model, "vocab": kept, "merges": merges}


def why_unequal(target: Any, draft: Any) -> str | None:
    """Why ids of one cannot be guesses for the other; None: they can."""
    vocabularies = (_whole(one).get_vocab(with_added_tokens=False) for one in (target, draft))
    reason = difference(*vocabularies) or clash(added_tokens(target), added_tokens(draft))
    if reason is not None:
        return reason
    ours, theirs = ({**base["model"], **base} for base in (_base(target), _base(draft)))
    differing = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
    known = [name for name in ("merges", "normalizer", "pre_tokenizer") if name in differing]
    return f"their {' and '.join(known) or 'models'} differ" if differing else None


def why_ids_differ(one: Any, other: Any) -> str | None:
    """Why a text's ids, added tokens too, may mean something else to the other; None: they do not."""
    if (reason := why_unequal(one, other)) is not None:
        return reason
    ours, theirs = added_tokens(one), added_tokens(other)
    differing = sorted({i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i)})
    return f"only one of them has the added token {differing[0]}; {len(differing)} differ" if differing else None


def difference(target: Mapping[str, int], draft: Mapping[str, int]) -> str | None:
    differing = {token for token in target.keys() | draft.keys() if target.get(token) != draft.get(token)}
    return _told(differing, target, draft) if differing else None


def clash(target: Mapping[int, str], draft: Mapping[int, str]) -> str | None:
    ours, theirs = ({token: i for i, token in added.items()} for added in (target, draft))
    moved = {token for token in ours.keys() & theirs.keys() if ours[token] != theirs[token]}
    taken = {token for i in target.keys() & draft.keys() if target[i] != draft[i] for token in (target[i], draft[i])}
    return _told(moved | taken, ours, theirs) if moved or taken else None


def _told(tokens: set[str], target: Mapping[str, int], draft: Mapping[str, int]) -> str:
    first = min(tokens, key=lambda token: (target.get(token, draft.get(token)), token))
    shown, count = repr(first[:64]), len(tokens)
    where = [f"id {ids[first]}" if first in ids else "no id" for ids in (target, draft)]
    return f"token {shown} has {where[0]} in the target and {where[1]} in the draft; {count} tokens differ"
