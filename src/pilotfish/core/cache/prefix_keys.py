"""Names of prefixes that processes, tiers and machines agree on: chained hashes of token ids, one for every 64 tokens.

    root ──► key 0 = H(root, tokens 0 .. 63) ──► key 1 = H(key 0, tokens 64 .. 127) ──► …

A key names all tokens up to its own, so equal keys mean equal prefixes. The root says what else must be equal: whose
the tokens are (the tenant's salt) and, where KV is named and not only text, all that shapes the KV.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

#: Tokens of an object: what a key adds to the one before it.
OBJECT_TOKENS = 64
#: Bytes of a key.
KEY_BYTES = 32

Key = bytes


def root_key(shape: bytes, salt: str | None) -> Key:
    """The key before the first tokens. `shape` is a digest of all that shapes what the keys name; no salt and the
    empty one are two tenants."""
    tenant = b"" if salt is None else b"salt" + salt.encode()
    return hashlib.sha256(hashlib.sha256(shape).digest() + tenant).digest()


def next_key(above: Key, tokens: Sequence[int] | NDArray[np.integer]) -> Key:
    return hashlib.sha256(above + np.asarray(tokens, "<u4").tobytes()).digest()


def prefix_keys(root: Key, tokens: Sequence[int] | NDArray[np.integer]) -> list[Key]:
    """A key for every `OBJECT_TOKENS` tokens; the last ones, if they are fewer, have none."""
    keys, ids, size = [root], np.asarray(tokens, "<u4").tobytes(), 4 * OBJECT_TOKENS
    for first in range(0, len(ids) - size + 1, size):
        keys.append(hashlib.sha256(keys[-1] + ids[first : first + size]).digest())
    return keys[1:]
