"""A parser is a coroutine over a `Reader`: it is suspended where the text ends, until more comes. It sees characters,
runs and marks, never the boundaries of the parts; so no boundary can matter."""

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

Read = TypeVar("Read")
#: Waits for text at each yield.
Reading = Generator[None, None, Read]
Sink = Callable[[str], object]
HEX = frozenset("0123456789abcdefABCDEF")


class Reader:
    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # text before it was taken
        self._ended = False
        self._taken: list[str] = []

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        self._ended = True

    def peek(self) -> Reading[str]:
        """The next character; "" at the end of the text."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def take(self, count: int) -> str:
        self._at += count
        taken = self._text[self._at - count : self._at]
        self._taken.append(taken)
        return taken

    def run(self, pattern: re.Pattern[str], sink: Sink) -> Reading[None]:
        """All that `pattern` matches, as it comes. It may stop before a cut match: the caller reads on."""
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None  # it matches no characters too
            if match.end() > self._at:
                sink(self.take(match.end() - self._at))
            if self._at < len(self._text) or not (yield from self.peek()):
                return

    def span(self, pattern: re.Pattern[str]) -> Reading[str]:
        parts: list[str] = []
        yield from self.run(pattern, parts.append)
        return "".join(parts)

    def mark(self, marks: Sequence[str]) -> Reading[str]:
        """The one of `marks` that comes next, not taken yet; "" for other text. No mark may begin another."""
        while True:
            rest = len(self._text) - self._at
            for mark in marks:
                if self._text.startswith(mark, self._at):
                    return mark
            may_come = any(rest < len(mark) and mark.startswith(self._text[self._at :]) for mark in marks)
            if self._ended or not may_come:
                return ""
            yield

    def digits(self, allowed: frozenset[str], most: int) -> Reading[str]:
        """Takes up to `most` digits, of those that are `allowed`."""
        number = ""
        while len(number) < most and (yield from self.peek()) in allowed:
            number += self.take(1)
        return number

    def taken(self) -> str:
        return "".join(self._taken)

    def forget(self) -> None:
        self._taken.clear()
