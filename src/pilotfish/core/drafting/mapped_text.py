"""A target's sequence as a draft with another tokenizer reads it.

    target   … " re" "turn" " x"                    draft   … " return" " x"
             + " +" "="   nobody guessed them             + " +="            the last words are written anew
             + " 1"       it was guessed                  + " 1"             its counterpart is added

Tokens that were guessed are followed one by one, for they have counterparts, and KV: so a tree and what the draft reads
stay one. After others the last bytes of the text are written anew by the draft's tokenizer, which may join what the
target has in pieces; what the draft reads then begins as before, and KV of that stays. Where the target has all of the
draft's tokens there is nothing to join, and each token is read by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from pilotfish.core.drafting.vocabulary_map import VocabularyMap

#: Bytes of the text's end that may be written anew, at least; from a word's beginning on if there is one before twice
#: as many.
WINDOW = 64
_SPACES = b" \t\r\n"


class MappedText:
    """What the draft reads of one sequence: `inputs`, the same list for ever."""

    def __init__(self, vocabulary: VocabularyMap, tokens: Sequence[int]) -> None:
        """`tokens` are the target's, as all that follow."""
        self.map = vocabulary
        begun = [vocabulary.mark(token) for token in tokens[:1]]
        self.inputs: list[int] = list(() if begun[:1] == list(vocabulary.lead[:1]) else vocabulary.lead)
        self._start = len(self.inputs)  # from here on they may be written anew,
        self._open = bytearray()  # as this text
        self.read(tokens)

    def follow(self, tokens: Sequence[int]) -> None:
        """These were guessed."""
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
        """These were not; how many of the first inputs stay as they were."""
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
        """The open text anew; how many inputs stay."""
        written, same = self.map.written(bytes(self._open)), self._start
        for before, now in zip(self.inputs[self._start :], written, strict=False):
            if before != now:
                break
            same += 1
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
