"""Outputs cut anywhere, and what parsers make of them."""

from collections.abc import Iterator, Sequence

from pilotfish.grammar.parsers.pieces import Arguments, CallBegin, Content, OutputParser, Piece, joined


def parse(parser: OutputParser, parts: Sequence[str]) -> list[Piece]:
    pieces: list[Piece] = []
    for part in parts:
        pieces += parser.feed(part)
    return joined(pieces + parser.finish())


def parts_of(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def single_cuts(text: str) -> Iterator[tuple[str, str]]:
    return ((text[:at], text[at:]) for at in range(len(text) + 1))


def pairs_of_cuts(text: str) -> Iterator[tuple[str, str, str]]:
    return ((text[:i], text[i:j], text[j:]) for i in range(len(text)) for j in range(i + 1, len(text)))


def content_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Content))


def calls_of(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Name and arguments of each call; its pieces follow its beginning and name no other."""
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, CallBegin):
            assert piece.index == len(calls)
            calls.append((piece.name, ""))
        elif isinstance(piece, Arguments):
            assert piece.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return calls
