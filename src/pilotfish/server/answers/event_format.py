"""An answer of /v1/responses or /v1/messages: one output as parts (items, blocks), which grow with the output's pieces,
in a stream of events that are named by their types.

pieces   Reasoning  Reasoning   Content  Content   CallBegin  Arguments  Arguments     end
parts    a thought              a text             a call

A part ends where a piece of another kind comes. Only the number of deltas depends on how an output was cut."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from pilotfish.core.scheduling.executor import TokenLogprobs
from pilotfish.grammar.parsers.pieces import Arguments, CallBegin, Content, Piece, Reasoning
from pilotfish.server.answers.formats import AnswerFormat, OutputBuffer, Part
from pilotfish.server.http_errors import encode
from pilotfish.wire.serving import Delta

PartStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]  # of a part, and of an answer


@dataclass
class TokenBuffer(OutputBuffer):
    #: What each token completed, and its log-probabilities where they were asked for; then what the end completed.
    scored: list[tuple[list[Piece], TokenLogprobs | None]] = field(default_factory=list)
    reasoning_tokens: int = 0
    _text: str = ""  # not yet read by the parser
    _read: int = 0  # characters that the parser has read
    _waiting: deque[int] = field(default_factory=deque)  # ends of tokens whose text has not all come
    _scores: deque[TokenLogprobs] = field(default_factory=deque)  # log-probabilities of the waiting tokens, if wanted
    _since: int = 0  # tokens since the last piece

    def read(self, delta: Delta) -> None:
        """Text comes later than its tokens where a stop string or a character may go on."""
        self._text += delta.text
        self._waiting += delta.ends
        self._scores += delta.logprobs
        ended = delta.finish is not None
        while self._waiting and (ended or self._waiting[0] <= self._read + len(self._text)):
            size = self._waiting.popleft() - self._read
            self._read += size
            text, self._text = self._text[:size], self._text[size:]
            self._token(self.parser.feed(text))
        if ended:
            self._add(self.parser.feed(self._text) + self.parser.finish(), None)

    def clear(self) -> None:
        super().clear()
        self.scored.clear()

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


class OpenPart(Protocol):
    """A part grows by pieces. All methods but `whole`, the part as it stands, give events of the stream."""

    def begin(self) -> list[Part]: ...

    def add(self, text: str, logprobs: list[Part]) -> list[Part]: ...

    def end(self, status: PartStatus) -> list[Part]: ...

    def whole(self, status: PartStatus) -> Part: ...


class PartWriter:
    def __init__(self, make: Callable[[int, Piece], OpenPart]) -> None:
        self._make = make
        self._ended: list[Part] = []
        self._open: OpenPart | None = None
        self._kind: type[Piece] | None = None  # of the pieces that the open part is made of
        self._logprobs: list[Part] = []  # of tokens whose text has not come yet

    @property
    def parts(self) -> list[Part]:
        return [*self._ended, *([] if self._open is None else [self._open.whole("incomplete")])]

    def add(self, pieces: Iterable[Piece], logprobs: Iterable[Part] = ()) -> list[Part]:
        self._logprobs += logprobs
        return [event for piece in pieces for event in self._piece(piece)]

    def end(self, status: PartStatus = "completed") -> list[Part]:
        left = self._text("") if self._logprobs and self._kind is Content else []
        return [*left, *self._end(status)]

    def begin(self, piece: Piece) -> list[Part]:
        ended = self._end("completed")
        self._open, self._kind = self._make(len(self._ended), piece), type(piece)
        return [*ended, *self._open.begin()]

    def _piece(self, piece: Piece) -> list[Part]:
        if isinstance(piece, CallBegin):
            return self.begin(piece)
        more_of_call = isinstance(piece, Arguments)
        if not piece.text or (more_of_call and self._open is None):
            return []
        if more_of_call or type(piece) is self._kind:
            return self._text(piece.text)
        if isinstance(piece, Content):
            self._logprobs = _covering(self._logprobs, piece.text)
        return [*self.begin(piece), *self._text(piece.text)]

    def _text(self, text: str) -> list[Part]:
        assert self._open is not None
        logprobs, self._logprobs = self._logprobs, []
        return self._open.add(text, logprobs)

    def _end(self, status: PartStatus) -> list[Part]:
        if self._open is None:
            return []
        ended, self._open, self._kind = self._open, None, None
        events = ended.end(status)
        self._ended.append(ended.whole(status))
        return events


def _covering(logprobs: list[Part], text: str) -> list[Part]:
    """The last log-probabilities, whose tokens cover a text: those before are of marks."""
    missing, first = len(text.encode()), len(logprobs)
    while first and missing > 0:
        first -= 1
        missing -= len(logprobs[first]["bytes"])
    return logprobs[first:]


class EventFormat(AnswerFormat):
    end_of_stream = b""
    buffer = TokenBuffer

    def __post_init__(self) -> None:
        super().__post_init__()
        (output,) = self.outputs
        assert isinstance(output, TokenBuffer)
        self.output, self.prompt_tokens = output, len(self.generation.prompts[0].tokens)

    def encoded(self, event: Part) -> bytes:
        return f"event: {event['type']}\ndata: ".encode() + encode(event) + b"\n\n"
