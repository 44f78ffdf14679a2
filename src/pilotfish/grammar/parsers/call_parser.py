from __future__ import annotations

import re
from abc import ABC, abstractmethod

from pilotfish.grammar.parsers.pieces import Arguments, CallBegin, Content, Piece, joined
from pilotfish.grammar.parsers.reader import Reader, Reading

SPACE = re.compile(r"\s*")


class TextParser(ABC):
    def __init__(self) -> None:
        self._reader = Reader()
        self._pieces: list[Piece] = []
        self._steps = self._read()

    def feed(self, text: str) -> list[Piece]:
        self._reader.add(text)
        next(self._steps)
        return self._made()

    def finish(self) -> list[Piece]:
        self._reader.end()
        next(self._steps, None)
        self._pieces += self._last()
        return self._made()

    @abstractmethod
    def _read(self) -> Reading[None]: ...

    def _last(self) -> list[Piece]:
        return []

    def _made(self) -> list[Piece]:
        pieces = joined(self._pieces)
        self._pieces.clear()
        return pieces


class CallParser(TextParser):
    """Every character taken is in a piece, or held by the reader for a later piece, or is part of a call's form. So a
    piece holds, or replaces, all that was taken before it."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0
        self._space: list[str] | None = []  # white space since the last call, while there was nothing else
        self._line_blank = True  # nothing but white space was content on this line

    def _last(self) -> list[Piece]:
        return [Content("".join(self._space))] if self._space and not self._calls else []

    def _content(self, text: str) -> None:
        self._reader.forget()
        *lines, last = text.split("\n")
        self._line_blank = (self._line_blank or bool(lines)) and not last.strip()
        if self._space is not None:
            self._space.append(text)
            if not text.strip():
                return
            text, self._space = "".join(self._space), None
        self._pieces.append(Content(text))

    def _begin(self, name: str) -> None:
        self._reader.forget()
        self._space, self._line_blank = [], True
        self._pieces.append(CallBegin(self._calls, name))
        self._calls += 1

    def _argue(self, text: str) -> None:
        self._reader.forget()
        self._pieces.append(Arguments(self._calls - 1, text))

    def _give_up(self) -> None:
        if text := self._reader.taken():
            self._content(text)

    def _leave(self, before: int) -> Reading[None]:
        """At the output's end, drops text after a call: a cut call or member. `before`: the calls before this group."""
        if self._calls > before and not (yield from self._reader.peek()):
            self._reader.forget()
        else:
            self._give_up()

    def _skip_space(self) -> Reading[str]:
        yield from self._reader.span(SPACE)
        return (yield from self._reader.peek())
