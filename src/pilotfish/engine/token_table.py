"""What the tokens of a tokenizer stand for, in bytes.

byte-level BPE     Ġreturn  âĺĥ  Ċ       each character is a byte:  ` return`  `☃`  a line's end
SentencePiece      ▁return  ☃  <0x0A>    ▁ is a space; bytes have tokens of their own
"""

import json
import re
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any

from tokenizers import Tokenizer

from pilotfish.core.drafting.vocabulary_map import TokenTable
from pilotfish.errors import InputError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "▁"
#: Special tokens that mean the same in all tokenizers, whatever they are called.
ROLES = ("bos", "eos")


def token_table(tokenizer: Any, vocab_size: int) -> TokenTable:
    """Of the ids below `vocab_size`. InputError for tokens that are neither bytes nor SentencePiece's."""
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    named = {token: one.content for token, one in added.items() if token < vocab_size}
    plain = {t: one.content.encode() for t, one in added.items() if t in named and not one.special}
    base = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    pieces = {token: piece for piece, token in base.items() if token < vocab_size and token not in added}
    encoder, special = _lossless(described), named.keys() - plain.keys()
    lead = takewhile(special.__contains__, tokenizer.backend_tokenizer.encode("a").ids)
    return TokenTable(
        _bytes_of(pieces, described) | plain,
        named,
        lambda text: encoder.encode(text, add_special_tokens=False).ids,
        tuple(lead),
        {role: token for role in ROLES if (token := getattr(tokenizer, f"{role}_token_id")) in special},
    )


def token_bytes(tokenizer: Any) -> Callable[[int], bytes]:
    decoder = tokenizer.backend_tokenizer.decoder
    described = None if decoder is None else json.loads(decoder.__getstate__())
    byte_level = any(part["type"] == "ByteLevel" for part in _parts(described))
    read = _of_byte_level if byte_level else _of_sentencepiece
    return lambda token: read(tokenizer.convert_ids_to_tokens(token) or "")


def _bytes_of(pieces: Mapping[int, str], described: Mapping[str, Any]) -> dict[int, bytes]:
    """Tokens for single bytes of SentencePiece come last."""
    kinds = {part["type"] for name in ("decoder", "pre_tokenizer", "normalizer") for part in _parts(described[name])}
    if "ByteLevel" in kinds:
        return {token: _of_byte_level(piece) for token, piece in sorted(pieces.items())}
    if not kinds & {"ByteFallback", "Metaspace"}:
        raise InputError("its tokens are neither bytes nor SentencePiece's, which can be mapped")
    last = sorted(pieces.items(), key=lambda item: (_BYTE_TOKEN.fullmatch(item[1]) is not None, item[0]))
    return {token: _of_sentencepiece(piece) for token, piece in last}


def _parts(component: Any) -> list[dict[str, Any]]:
    if component is None:
        return []
    below = next((component[name] for name in ("decoders", "pretokenizers", "normalizers") if name in component), None)
    return [component] if below is None else [one for part in below for one in _parts(part)]


def _byte_characters() -> dict[str, int]:
    """Visible bytes are themselves; the others have characters from 256 on, in order."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


_BYTES = _byte_characters()


def _of_byte_level(piece: str) -> bytes:
    known = all(character in _BYTES for character in piece)
    return bytes(_BYTES[character] for character in piece) if known else piece.encode()


def _of_sentencepiece(piece: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte is not None else piece.replace(_SPACE, " ").encode()


def _lossless(described: Mapping[str, Any]) -> Tokenizer:
    """For parts of a text: no space is put before it, nothing is cut, and what looks like a special token is text."""
    plain = {**described, **dict.fromkeys(("padding", "truncation", "post_processor"))}
    for part in _parts(plain["pre_tokenizer"]):
        if "add_prefix_space" in part:
            part["add_prefix_space"] = False
        if "prepend_scheme" in part:
            part["prepend_scheme"] = "never"
    for part in _parts(plain["normalizer"]):
        if part["type"] == "Prepend":
            part["prepend"] = ""
    encoder = Tokenizer.from_str(json.dumps(plain))
    encoder.encode_special_tokens = True
    return encoder
