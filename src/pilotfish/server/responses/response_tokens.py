"""An output that is read token by token, to tell what each token was for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pilotfish.core.scheduling.executor import TokenLogprobs
from pilotfish.grammar.parsers.pieces import Piece, Reasoning
from pilotfish.server.answers.stream import OutputBuffer
from pilotfish.wire.serving import Delta


@dataclass
class TokenBuffer(OutputBuffer):
    #: What each token completed, and its log-probabilities where they were asked for; then what the end completed.
    scored: list[tuple[list[Piece], TokenLogprobs | None]] = field(default_factory=list)
    reasoning_tokens: int = 0
    _text: str = ""  # that the parser has not read
    _read: int = 0  # characters that it has
    _waiting: deque[int] = field(default_factory=deque)  # ends of tokens whose text has not all come
    _scores: deque[TokenLogprobs] = field(default_factory=deque)  # theirs, where they were asked for
    _since: int = 0  # tokens since the last piece

    def read(self, delta: Delta) -> None:
        """Text comes later than its tokens where a stop string or a character may go on."""
        self._text += delta.text
        self._waiting += delta.ends
        self._scores += delta.logprobs
        ended = delta.finish is not None
        while self._waiting and (ended or self._waiting[0] <= self._read + len(self._text)):
            self._token(self.parser.feed(self._next(self._waiting.popleft())))
        if ended:
            self._add(self.parser.feed(self._text) + self.parser.finish(), None)

    def clear(self) -> None:
        super().clear()
        self.scored.clear()

    def _next(self, end: int) -> str:
        """The text up to a character of the whole output."""
        size = end - self._read
        text, self._text = self._text[:size], self._text[size:]
        self._read = end
        return text

    def _token(self, pieces: list[Piece]) -> None:
        self._since += 1
        if any(isinstance(piece, Reasoning) for piece in pieces):
            self.reasoning_tokens += self._since
        if pieces:
            self._since = 0
        self._add(pieces, self._scores.popleft() if self._scores else None)

    def _add(self, pieces: list[Piece], logprobs: TokenLogprobs | None) -> None:
        self.pieces += pieces
        self.scored.append((pieces, logprobs))
