"""Prefixes that a target has told a draft of, by their chained keys: an `Open` may name one instead of sending it.

    tokens of the first turn      [ 64 │ 64 │ 64 │ 20 ]     Open: all of them; both sides know three keys now
    tokens of the second turn     [ 64 │ 64 │ 64 │ 20 …  ]
                                               └ Open: prefix_key, and the tokens that follow it

Both sides compute keys from tokens, so a key can only stand for the tokens that it is of. Its root is the digest of the
salt: keys of two tenants differ. Both sides forget what was used longest ago, and a draft forgets a target's prefixes
with the target; it answers Resync to a key that it does not know, and gets all tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS, Key, prefix_keys, root_key
from pilotfish.core.drafting.messages import Open, Peer

#: Keys that a target remembers of one pool, and a draft of all targets together: of a million tokens, and of two.
MAX_TOLD, MAX_KNOWN = 1 << 14, 1 << 15


def text_root(salt: bytes | None) -> Key:
    """The key before the first token of sequences with this digest of a salt."""
    return root_key(b"", None if salt is None else salt.hex())


class ToldPrefixes:
    """The target's half: keys of what one pool was told."""

    def __init__(self, most: int = MAX_TOLD) -> None:
        self._most = most
        self._keys: OrderedDict[Key, None] = OrderedDict()  # used longest ago first

    def __len__(self) -> int:
        return len(self._keys)

    def shorten(self, message: Open) -> Open:
        """The message with the key of the longest prefix that the pool was told, which leaves one token at least. It
        is told all of it now."""
        keys = prefix_keys(text_root(message.salt), message.tokens)
        told = self._longest(keys[: (len(message.tokens) - 1) // OBJECT_TOKENS])
        self._add(keys)
        if not told:
            return message
        rest = message.tokens[told * OBJECT_TOKENS :]
        return msgspec.structs.replace(message, tokens=rest, prefix_key=keys[told - 1])

    def tell(self, salt: bytes | None, tokens: Sequence[int]) -> None:
        self._add(prefix_keys(text_root(salt), tokens))

    def known(self, salt: bytes | None, tokens: Sequence[int]) -> int:
        """First tokens of a sequence that it was told of, as far as keys tell."""
        return OBJECT_TOKENS * self._longest(prefix_keys(text_root(salt), tokens))

    def forget(self, salt: bytes | None, tokens: Sequence[int], kept: int) -> None:
        """Of these tokens it knows only the first `kept` ones."""
        for key in prefix_keys(text_root(salt), tokens)[kept // OBJECT_TOKENS :]:
            self._keys.pop(key, None)

    def _longest(self, keys: Sequence[Key]) -> int:
        return next((count for count in range(len(keys), 0, -1) if keys[count - 1] in self._keys), 0)

    def _add(self, keys: Sequence[Key]) -> None:
        """From the last to the first, which others begin with too."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        self._keys.clear()


@dataclass(frozen=True, slots=True)
class KnownPart:
    above: Key
    tokens: NDArray[np.uint32]  # [OBJECT_TOKENS]


class KnownPrefixes:
    """The draft's half: the tokens that targets have told it of, by key, each target's for itself. When there are too
    many, the target with the most loses what it used longest ago."""

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
        self._trim()

    def find(self, target: Peer, salt: bytes | None, key: Key) -> list[int] | None:
        """The tokens whose key this is; None where the target has told of none, or they are forgotten."""
        root, own = text_root(salt), self._parts.get(target) or OrderedDict[Key, KnownPart]()
        parts = list[NDArray[np.uint32]]()
        while key != root:
            part = own.get(key)
            if part is None:
                return None
            parts.append(part.tokens)
            key = part.above
        return [token for part in reversed(parts) for token in part.tolist()]

    def forget(self, target: Peer) -> None:
        self._size -= len(self._parts.pop(target, ()))

    def _trim(self) -> None:
        while self._size > self._most:
            max(self._parts.values(), key=len).popitem(last=False)
            self._size -= 1
