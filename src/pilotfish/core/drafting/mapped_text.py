"""A target's sequence as a draft with another tokenizer reads it.

    target   … " re" "turn" " x"                    draft   … " return" " x"
             + " +" "="   nobody guessed them             + " +="            the last words are written anew
             + " 1"       it was guessed                  + " 1"             its counterpart is added

Guessed tokens have counterparts with KV and are followed one by one. After others the last bytes of the text are
tokenized anew, which may join the target's pieces; the beginning and its KV stay. Where the target has all of the
draft's tokens each token is read by itself.
"""

from collections.abc import Sequence
from itertools import takewhile
from operator import eq

from pilotfish.core.drafting.vocabulary_map import VocabularyMap

#: Bytes of the text's end that may be written anew, at least; from a word's start if one is within twice as many.
WINDOW = 64
_SPACES = b" \t\r\n"


class MappedText:
    """`inputs` is the draft's reading of one sequence, the same list for ever."""

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
