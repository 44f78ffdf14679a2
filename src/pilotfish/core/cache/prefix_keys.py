"""Names of prefixes that processes, tiers and machines agree on: chained hashes of token ids, one for every 64 tokens.

    root ──► key 0 = H(root, tokens 0 .. 63) ──► key 1 = H(key 0, tokens 64 .. 127) ──► …

Equal keys mean equal prefixes. The root covers the tenant's salt and, where KV is named, all that KV depends on.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.core.peers.fields import Peer

OBJECT_TOKENS = 64  # tokens of an object: a key names so many more than the key before it
KEY_BYTES = 32  # bytes of a key

Key = bytes


def root_key(digest: bytes, salt: str | None) -> Key:
    """The key before the first tokens. `digest` is of all that KV depends on. No salt and "" are two tenants."""
    tenant = b"" if salt is None else b"salt" + salt.encode()
    return hashlib.sha256(hashlib.sha256(digest).digest() + tenant).digest()


def prefix_keys(root: Key, tokens: Sequence[int] | NDArray[np.integer]) -> list[Key]:
    """One key for every `OBJECT_TOKENS` tokens; a shorter rest has none."""
    keys, ids, size = [root], np.asarray(tokens, "<u4").tobytes(), 4 * OBJECT_TOKENS
    for first in range(0, len(ids) - size + 1, size):
        keys.append(hashlib.sha256(keys[-1] + ids[first : first + size]).digest())
    return keys[1:]


#: Keys that a target remembers of one pool, and a draft of all targets together: of a million tokens, and of two.
MAX_TOLD, MAX_KNOWN = 1 << 14, 1 << 15


def text_root(salt: bytes | None) -> Key:
    return root_key(b"", None if salt is None else salt.hex())


class ToldPrefixes:
    def __init__(self, most: int = MAX_TOLD) -> None:
        self._most = most
        self._keys: OrderedDict[Key, None] = OrderedDict()  # used longest ago first

    def __len__(self) -> int:
        return len(self._keys)

    def shorten(self, salt: bytes | None, tokens: Sequence[int]) -> tuple[Key | None, Sequence[int]]:
        """The key of the longest prefix told so far, and the tokens after it, at least one; all count as told now."""
        keys = prefix_keys(text_root(salt), tokens)
        told = self._longest(keys[: (len(tokens) - 1) // OBJECT_TOKENS])
        self._add(keys)
        return keys[told - 1] if told else None, tokens[told * OBJECT_TOKENS :]

    def tell(self, salt: bytes | None, tokens: Sequence[int]) -> None:
        self._add(prefix_keys(text_root(salt), tokens))

    def known(self, salt: bytes | None, tokens: Sequence[int]) -> int:
        return OBJECT_TOKENS * self._longest(prefix_keys(text_root(salt), tokens))

    def forget(self, salt: bytes | None, tokens: Sequence[int], kept: int) -> None:
        for key in prefix_keys(text_root(salt), tokens)[kept // OBJECT_TOKENS :]:
            self._keys.pop(key, None)

    def _longest(self, keys: Sequence[Key]) -> int:
        return next((count for count in range(len(keys), 0, -1) if keys[count - 1] in self._keys), 0)

    def _add(self, keys: Sequence[Key]) -> None:
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        self._keys.clear()


class KnownPart(NamedTuple):
    above: Key
    tokens: NDArray[np.uint32]  # [OBJECT_TOKENS]


class KnownPrefixes:
    """Tokens that targets have told, by key. When full, the target with the most loses what it used longest ago."""

    def __init__(self, most: int = MAX_KNOWN) -> None:
        self._most = most
        self._parts: dict[Peer, OrderedDict[Key, KnownPart]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, target: Peer, salt: bytes | None, tokens: Sequence[int]) -> None:
        root, ids = text_root(salt), np.asarray(tokens, np.uint32)
        keys, own = prefix_keys(root, tokens), self._parts.setdefault(target, OrderedDict())
        before = len(own)
        for place, key in reversed(list(enumerate(keys))):
            if key not in own:
                part = ids[place * OBJECT_TOKENS : (place + 1) * OBJECT_TOKENS].copy()
                own[key] = KnownPart(keys[place - 1] if place else root, part)
            own.move_to_end(key)
        self._size += len(own) - before
        while self._size > self._most:
            max(self._parts.values(), key=len).popitem(last=False)
            self._size -= 1

    def find(self, target: Peer, salt: bytes | None, key: Key) -> list[int] | None:
        root, own, parts = text_root(salt), self._parts.get(target), list[NDArray[np.uint32]]()
        while key != root:
            if own is None or key not in own:
                return None
            key, part = own[key]
            parts.append(part)
        return [token for part in reversed(parts) for token in part.tolist()]

    def forget(self, target: Peer) -> None:
        self._size -= len(self._parts.pop(target, ()))
