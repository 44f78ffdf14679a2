import re
from abc import ABC, abstractmethod
from collections.abc import Sequence

from pilotfish.grammar.parsers.grammars import Tool
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
    piece holds, or replaces, all that was taken before it.

    Calls stand behind `mark`, up to `end` if there is such a mark; also on lines that begin with the sign `bare`."""

    def __init__(self, tools: Sequence[Tool], mark: str, end: str | None = None, bare: str = "") -> None:
        super().__init__()
        self._names = {tool.name for tool in tools}
        self._mark, self._end, self._bare = mark, (end,) if end else (), bare
        self._inside = False  # behind calls, before their end mark
        self._plain = re.compile(f"[^{re.escape(mark[0] + bare)}]*")
        self._calls = 0
        self._space: list[str] | None = []  # white space since the last call, while there was nothing else
        self._line_blank = True  # nothing but white space was content on this line

    def _read(self) -> Reading[None]:
        while True:
            yield from self._reader.run(self._plain, self._content)
            sign = yield from self._reader.peek()
            if not sign:
                return
            if sign == self._bare and self._line_blank:
                yield from self._bare_calls()
            elif mark := (yield from self._reader.mark((self._mark, *(self._end if self._inside else ())))):
                self._reader.take(len(mark))
                yield from self._marked(mark)
            else:
                self._content(self._reader.take(1))

    @abstractmethod
    def _bare_calls(self) -> Reading[None]: ...

    @abstractmethod
    def _marked(self, mark: str) -> Reading[None]: ...

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
