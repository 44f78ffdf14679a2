"""The KV of `OBJECT_TOKENS` consecutive tokens: what tiers keep and move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from pilotfish.core.cache.prefix_keys import Key

TokenIds = NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class KVObject:
    """The checksum is computed when KV is read off the device and verified when it goes back: it finds what happened in
    between, wherever that was."""

    key: Key  # names all tokens up to the last of these
    tokens: TokenIds  # [OBJECT_TOKENS]
    data: NDArray[np.uint8]  # [object bytes]
    checksum: int

    @classmethod
    def of(cls, key: Key, tokens: Sequence[int] | NDArray[np.integer], data: NDArray[np.uint8]) -> KVObject:
        """An object with its checksum. `data` is kept, not copied."""
        ids = np.array(tokens, np.uint32)
        return cls(key, ids, data, checksum(key, ids, data))

    def intact(self, expected_tokens: Sequence[int] | NDArray[np.integer]) -> bool:
        """Whether this is still what the checksum was computed from, and KV of these very tokens."""
        same = np.array_equal(self.tokens, np.asarray(expected_tokens))
        return same and self.checksum == checksum(self.key, self.tokens, self.data)


def checksum(key: Key, tokens: TokenIds, data: NDArray[np.uint8]) -> int:
    """CRC-32: finds every damage to at most 32 bits in a row, and all but one in 2^32 of other accidents. ISA-L
    computes it about as fast as memory is copied, and leaves other threads the interpreter. Forgery is not its
    business: whoever can write objects can write checksums."""
    named = isal_zlib.crc32(tokens.astype("<u4", copy=False).data, isal_zlib.crc32(key))
    return isal_zlib.crc32(data.data, named)
