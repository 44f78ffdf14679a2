"""Single tokens as text and bytes, for log-probabilities."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any, Protocol

from tokenizers.pre_tokenizers import ByteLevel

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_level() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table): printable bytes stand for
    themselves, the others, in order, for the characters from 256 on."""
    characters = sorted(ByteLevel.alphabet())
    own = {character: ord(character) for character in characters if ord(character) < 256}
    others = sorted(set(range(256)) - set(own.values()))
    moved = [character for character in characters if ord(character) >= 256]
    return own | dict(zip(moved, others, strict=True))


class TokenNames(Protocol):
    """How log-probabilities name a token."""

    def of(self, token: int, /) -> tuple[str, list[int]]:
        """Its name and its bytes."""
        ...


class Pieces:
    """Names tokens by their text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {}
        self._table = _byte_level() if '"ByteLevel"' in json.dumps(decoder) else None
        self.of = lru_cache(1 << 16)(self._of)

    def _of(self, token: int) -> tuple[str, list[int]]:
        """Its text and its bytes. As OpenAI does, bytes that are no text alone are written bytes:\\xe2\\x98."""
        data = self._bytes(self._tokenizer.convert_ids_to_tokens(token) or "")
        try:
            return data.decode(), list(data)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), list(data)

    def _bytes(self, piece: str) -> bytes:
        if self._table is not None:
            inside = all(character in self._table for character in piece)
            return bytes(self._table[character] for character in piece) if inside else piece.encode()
        if byte := _BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace("▁", " ").encode()


class TokenIdNames:
    """Names tokens by their ids."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

    def of(self, token: int) -> tuple[str, list[int]]:
        return f"token_id:{token}", self._pieces.of(token)[1]
