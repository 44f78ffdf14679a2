"""Which tokens of two tokenizers stand for the same text, so that a draft with one guesses for a target with the other.

    target   " return" "s" " (" "x" <|end|>     the target's ids: on the wire, in trees, rules, masks and noise
                 │      │          │    │
    draft    " return" "s" " " "(" "x" </s>     the draft's ids: only what its forward reads

Drafts give ids of the target, of tokens that both have (`core.scheduling.executor.SharedTokens`). They read the
target's text as their own tokenizer writes it (`MappedText`).
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from operator import eq

import numpy as np
from numpy.typing import NDArray

from pilotfish.core.sampling.constraint import GrammarSource, MaskMaker, masks_when_asked, no_grammars
from pilotfish.core.scheduling.executor import SharedTokens

#: Read in place of text that the draft has no token for. No vocabulary is as large.
UNREAD = (1 << 31) - 1
LONGEST_SPELLED = 16  # bytes of the longest token that bytes are spelled with
_ESCAPED = re.compile(r"([\udc80-\udcff]+)")  # bytes that are no UTF-8, in a text decoded with `surrogateescape`


@dataclass(frozen=True)
class TokenTable:
    plain: Mapping[int, bytes]  # of tokens with the same bytes the first is the one that the tokenizer writes
    added: Mapping[int, str]  # texts of added tokens; of those that are not special the bytes are in `plain`, too
    encode: Callable[[str], Sequence[int]]  # writes a text, even one like a special token, without special tokens
    lead: tuple[int, ...] = ()  # special tokens that the tokenizer puts before a text
    roles: Mapping[str, int] = field(default_factory=dict)  # special tokens by their use

    @property
    def size(self) -> int:
        return 1 + max(chain(self.plain, self.added), default=-1)

    def spellings(self) -> dict[bytes, int]:
        found = dict[bytes, int]()
        for token, data in self.plain.items():
            if data:
                found.setdefault(data, token)
        return found


class VocabularyMap:
    def __init__(self, target: TokenTable, draft: TokenTable) -> None:
        self.size = target.size  # ids of the target that are known of
        self.lead = draft.lead
        self._draft, self._spellings = draft, draft.spellings()
        self._pairs = _pairs(target, draft)
        self._texts = {token: text.encode() for token, text in target.added.items()} | dict(target.plain)
        if (begin := target.roles.get("bos")) is not None and begin not in self._pairs:
            self._texts[begin] = b""  # the draft's own comes first, if it has one
        unlike = (
            t for t, d in self._pairs.items() if target.plain.get(t) != draft.plain.get(d) or t not in target.plain
        )
        self._marks = {token: self._pairs[token] for token in unlike}
        #: Whether the target has every token that the draft writes: each of its own is then read by itself.
        self.nested = set(self._spellings.values()) <= set(self._pairs.values())
        self._pieces = dict[int, list[int]]()
        ids = sorted(self._pairs)
        self.shared = SharedTokens(np.array(ids, np.int64), np.array([self._pairs[token] for token in ids], np.int64))

    def counterpart(self, token: int) -> int:
        return self._pairs[token]

    def mark(self, token: int) -> int | None:
        """The draft's token for a special one of the target's; None for one that belongs to text."""
        return self._marks.get(token) if token in self._texts else UNREAD

    def text(self, token: int) -> bytes:
        """Only for tokens without a `mark`."""
        return self._texts[token]

    def pieces(self, token: int) -> list[int]:
        own = self._pairs.get(token, self.mark(token))
        if own is not None:
            return [own]
        if token not in self._pieces:
            self._pieces[token] = self.written(self.text(token))
        return self._pieces[token]

    def length(self, token: int) -> int:
        return len(self._draft.plain.get(token, b"?"))

    def written(self, data: bytes) -> list[int]:
        parts = _ESCAPED.split(data.decode(errors="surrogateescape"))  # text, bytes that are none, text, …
        tokens = list[int]()
        for place, part in enumerate(parts):
            tokens += self._spelled(part.encode(errors="surrogateescape")) if place % 2 else self._encoded(part)
        return tokens

    def _encoded(self, text: str) -> list[int]:
        """Spells lines that the tokenizer would change, as a normalizer may."""
        whole = self._unchanged(text)
        if whole is not None:
            return whole
        lines = ((line, self._unchanged(line)) for line in text.splitlines(keepends=True))
        return [token for line, own in lines for token in (self._spelled(line.encode()) if own is None else own)]

    def _unchanged(self, text: str) -> list[int] | None:
        tokens = list(self._draft.encode(text))
        said = b"".join(self._draft.plain.get(token, b"") for token in tokens)
        return tokens if said == text.encode() else None

    def _spelled(self, data: bytes) -> list[int]:
        tokens, place = list[int](), 0
        while place < len(data):
            ends = range(min(place + LONGEST_SPELLED, len(data)), place, -1)
            end = next((end for end in ends if data[place:end] in self._spellings), place + 1)
            tokens.append(self._spellings.get(data[place:end], UNREAD))
            place = end
        return tokens


def _pairs(target: TokenTable, draft: TokenTable) -> dict[int, int]:
    """Tokens of both, each once: added ones by text, special ones by role, all by bytes."""
    by_text = {text: token for token, text in draft.added.items()}
    pairs = dict[int, int]()
    _pair(pairs, ((token, by_text.get(text)) for token, text in target.added.items()))
    _pair(pairs, ((token, draft.roles.get(role)) for role, token in target.roles.items()))
    spellings = draft.spellings()
    _pair(pairs, ((token, spellings.get(data)) for data, token in target.spellings().items()))
    return pairs


def _pair(pairs: dict[int, int], found: Iterable[tuple[int, int | None]]) -> None:
    taken = set(pairs.values())
    for token, counterpart in found:
        if counterpart is not None and token not in pairs and counterpart not in taken:
            pairs[token] = counterpart
            taken.add(counterpart)


@dataclass(frozen=True)
class Unshared:
    ids: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    first: int = 1 << 31  # and all from here on

    def mask(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        beyond = tokens >= self.first
        return beyond | np.isin(tokens, self.ids) if len(self.ids) else beyond


@dataclass(frozen=True)
class MappedVocabulary:
    map: VocabularyMap
    added_tokens: Mapping[int, str]  # of the target, beyond its base vocabulary, by their ids
    grammars: GrammarSource = no_grammars  # by the target's tokenizer
    masks: MaskMaker = masks_when_asked  # of those


#: Bytes of the text's end that may be written anew, at least; from a word's start if one is within twice as many.
WINDOW = 64
_SPACES = b" \t\r\n"


class MappedText:
    """A target's sequence as a draft with another tokenizer reads it; `inputs` is the same list for ever.

        target   … " re" "turn" " x"                    draft   … " return" " x"
                 + " +" "="   nobody guessed them             + " +="            the last words are written anew
                 + " 1"       it was guessed                  + " 1"             its counterpart is added

    Guessed tokens have counterparts with KV and are followed one by one. After others the last bytes of the text are
    tokenized anew, which may join the target's pieces; the beginning and its KV stay. Where the target has all of the
    draft's tokens each token is read by itself."""

    def __init__(self, vocabulary: VocabularyMap, tokens: Sequence[int]) -> None:
        self.map = vocabulary
        begun = [vocabulary.mark(token) for token in tokens[:1]]
        self.inputs: list[int] = list(() if begun[:1] == list(vocabulary.lead[:1]) else vocabulary.lead)
        self._start = len(self.inputs)  # from here on they may be written anew,
        self._open = bytearray()  # as this text
        self.read(tokens)

    def follow(self, tokens: Sequence[int]) -> None:
        """Add guessed tokens."""
        if self.map.nested:
            self.inputs += map(self.map.counterpart, tokens)
            return
        for token in tokens:
            self.inputs.append(self.map.counterpart(token))
            if self.map.mark(token) is None:
                self._open += self.map.text(token)
            else:
                self._begin()
        self._shorten()

    def read(self, tokens: Sequence[int]) -> int:
        """Add tokens that were not guessed; how many first inputs stay."""
        kept = len(self.inputs)
        if self.map.nested:
            self.inputs += [piece for token in tokens for piece in self.map.pieces(token)]
            return kept
        for token in tokens:
            mark = self.map.mark(token)
            if mark is None:
                self._open += self.map.text(token)
            else:
                kept = min(kept, self._write())
                self.inputs.append(mark)
                self._begin()
        kept = min(kept, self._write())
        self._shorten()
        return kept

    def _begin(self) -> None:
        """No text reaches across a special token."""
        self._start = len(self.inputs)
        self._open.clear()

    def _write(self) -> int:
        written = self.map.written(bytes(self._open))
        same: int = self._start + sum(takewhile(bool, map(eq, self.inputs[self._start :], written)))
        self.inputs[same:] = written[same - self._start :]
        return same

    def _shorten(self) -> None:
        if len(self._open) <= 2 * WINDOW:
            return
        start, size = len(self.inputs), 0
        while start > self._start and size < 2 * WINDOW:
            start -= 1
            size += self.map.length(self.inputs[start])
            if size >= WINDOW and self._open[-size] in _SPACES:
                break
        self._start = start
        del self._open[:-size]
