from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class CallBegin:
    index: int  # counts the output's calls
    name: str


@dataclass(frozen=True)
class Arguments:
    """Joined arguments of a call are a JSON object, unless the output was cut or the model wrote none."""

    index: int
    text: str


Piece = Reasoning | Content | CallBegin | Arguments


class OutputParser(Protocol):
    """Reads one output. The joined pieces depend on the text alone, not on how it was cut."""

    def feed(self, text: str) -> list[Piece]:
        """The next part of the output, of any length."""

    def finish(self) -> list[Piece]:
        """No more comes: what was held back."""


class ContentParser:
    def feed(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


def content_of(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Content))


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    groups = groupby(pieces, key=lambda piece: (type(piece), getattr(piece, "index", 0)))
    return [_join(list(group)) for _, group in groups]


def _join(group: list[Piece]) -> Piece:
    first = group[0]
    if isinstance(first, CallBegin) or len(group) == 1:
        return first
    return replace(first, text="".join(piece.text for piece in group if not isinstance(piece, CallBegin)))
