"""What the tokens of a tokenizer stand for, in bytes and, one after the other, in text.

byte-level BPE     Ġreturn  âĺĥ  Ċ       each character is a byte:  ` return`  `☃`  a line's end
SentencePiece      ▁return  ☃  <0x0A>    ▁ is a space; bytes have tokens of their own
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from pilotfish.core.drafting.vocabulary_map import TokenTable
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.errors import InputError

#: Last tokens of a prompt that a decoder needs to continue its text.
CONTEXT = 6
DEFAULTS = SamplingParams()
#: The beginning of a character of UTF-8 at the end of bytes, which more bytes could complete (Unicode's table 3-7).
BEGUN_CHARACTER = re.compile(
    rb"(?:[\xc2-\xdf]|\xe0[\xa0-\xbf]?|[\xe1-\xec\xee\xef][\x80-\xbf]?|\xed[\x80-\x9f]?"
    rb"|\xf0(?:[\x90-\xbf][\x80-\xbf]?)?|[\xf1-\xf3][\x80-\xbf]{0,2}|\xf4(?:[\x80-\x8f][\x80-\xbf]?)?)\Z"
)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "▁"
ROLES = ("bos", "eos")  # special tokens that mean the same in all tokenizers, whatever they are called


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


class TextStream:
    """Token ids to text, a piece at a time: never half a character, never part of a stop string.

    text     print("a")\\nif __na        `text` holds what was decoded so far,
    safe     print("a")\\n               `take` gives it up to where a stop string may have begun
    """

    def __init__(
        self,
        tokenizer: Any,
        params: SamplingParams = DEFAULTS,
        stop_ids: Collection[int] = (),
        prompt: Sequence[int] = (),
    ) -> None:
        """Some decoders drop the space before a text's first word, so they need the `prompt`."""
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._params = params
        self._stop_ids = stop_ids
        self._shows_stop = params.include_stop_str_in_output
        self._decoder = self._decoder_after(self._end_of(prompt))
        self._pending: list[int] = []  # ids whose bytes do not end on a character yet
        self._forced = params.min_tokens  # tokens to come that end nothing
        self._taken = 0
        self._ends: list[int] = []  # [tokens not yet taken] characters of `text` after each token
        self.text = ""
        self.ended = False
        self.stop: str | None = None  # the stop string that ended it

    def add(self, token: int) -> bool:
        completes_stop = self._append(token)
        self._ends.append(len(self.text))
        return completes_stop

    def _append(self, token: int) -> bool:
        if token in self._stop_ids and not self._shows_stop:
            return False
        self._pending.append(token)
        piece = self._decode_last()
        self._forced -= 1
        if not piece:
            return False
        self._pending.clear()
        before, self.text = len(self.text), self.text + piece
        return self._cut(before)

    def _decode_last(self) -> str | None:
        try:
            return self._decoder.step(self._backend, self._pending[-1])
        except Exception:  # the token changes earlier text; tokenizers has no narrower type for this
            self._decoder = self._decoder_after(self._pending[-1:])
            return self._decode(self._pending)

    def _decoder_after(self, tokens: list[int]) -> DecodeStream:
        return DecodeStream(ids=tokens, skip_special_tokens=self._params.skip_special_tokens)

    def _cut(self, before: int) -> bool:
        if self._forced >= 0:
            return False
        starts = ((self.text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in self._params.stop)
        found = [(start, stop) for start, stop in starts if start >= 0]
        if found:
            start, self.stop = min(found)
            end = start + len(self.stop) if self._shows_stop else start
            self.text, self.ended = self.text[:end], True
        return self.ended

    def finish(self) -> None:
        """Pending whole characters become text, other bytes replacement characters, except a begun one at the end."""
        if not self.ended and self._pending:
            before = len(self.text)
            self.text += self._whole_characters(self._pending)
            self._cut(before)
            if self._ends:
                self._ends[-1] = len(self.text)
        self._pending.clear()
        self.ended = True

    def _whole_characters(self, tokens: Sequence[int]) -> str:
        added = self._backend.get_added_tokens_decoder() if self._params.skip_special_tokens else {}
        hidden = {token for token, one in added.items() if one.special}
        bytes_of, shown = token_bytes(self._tokenizer), [token for token in tokens if token not in hidden]
        found = BEGUN_CHARACTER.search(b"".join(map(bytes_of, shown)))
        begun = 0 if found is None else len(found[0])
        while begun and (size := len(bytes_of(shown[-1]))) <= begun:
            shown.pop()
            begun -= size
        text = self._decode(shown)
        return text.removesuffix("\ufffd") if begun else text  # the last token ends a character, and begins one

    def take(self) -> str:
        """The text not yet taken that no stop string can still swallow."""
        awaited = () if self.ended or self._shows_stop else self._params.stop
        end = len(self.text) - max(map(self._begun, awaited), default=0)
        piece = self.text[self._taken : end]
        self._taken += len(piece)
        return piece

    def take_ends(self) -> list[int]:
        """For each token since the last call, the length of the whole text after it."""
        ends, self._ends = self._ends, []
        return ends

    def _begun(self, stop: str) -> int:
        sizes = range(min(len(stop) - 1, len(self.text)), 0, -1)
        return next((size for size in sizes if self.text.endswith(stop[:size])), 0)

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """Tokens from which a decoder can go on; none if they do not end on a character."""
        end = list(prompt[-CONTEXT:])
        return [] if self._decode(end).endswith("\ufffd") else end

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._params.skip_special_tokens))
