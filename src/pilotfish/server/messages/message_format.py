"""Events: `message_start`, those of blocks, `message_delta` with the usage, `message_stop`; or `error` at the end."""

from bisect import bisect_left
from collections.abc import Callable

import jiter

from pilotfish.core.scheduling.request import FinishReason
from pilotfish.grammar.parsers.pieces import CallBegin, Piece, Reasoning
from pilotfish.server.answers.event_format import EventFormat, OpenPart, PartStatus, PartWriter
from pilotfish.server.answers.formats import OutputBuffer, Part
from pilotfish.server.http_errors import HttpError
from pilotfish.server.messages.message_chat import CALL

#: Types of deltas, by the field that holds their text.
DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "partial_json": "input_json_delta"}


class MessageFormat(EventFormat):
    def __post_init__(self) -> None:
        super().__post_init__()
        call_id = self.generation.reading.call_id
        self._writer = PartWriter(lambda index, piece: open_block(call_id, index, piece))

    def whole(self) -> Part:
        self._grown()
        return {**self._message(), **self._stop(), "usage": self.usage(), **self.metrics()}

    def chunks(self, output: OutputBuffer) -> list[Part]:
        opening: list[Part] = []
        if not output.begun:  # the output's tokens are told at the end
            opening = [{"type": "message_start", "message": {**self._message(), "usage": self._usage(0, 0)}}]
        events = [*opening, *self._grown()]
        if output.finish is None:
            return events
        ended = {"type": "message_delta", "delta": self._stop(), "usage": self.usage(), **self.metrics()}
        return [*events, ended, {"type": "message_stop"}]

    def failure(self, error: HttpError) -> list[Part]:
        return [error.message_body(self.head["id"].removeprefix(self.body.id_prefix))]

    def usage(self) -> Part:
        return self._usage(self.output.tokens, self.output.reasoning_tokens)

    def _usage(self, tokens: int, thinking: int) -> Part:
        cached = self._cached().total()
        return {
            "input_tokens": self.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": tokens,
            "output_tokens_details": {"thinking_tokens": thinking},
        }

    def _grown(self) -> list[Part]:
        events = self._writer.add(self.output.pieces)
        return events if self.output.finish is None else events + self._writer.end()

    def _message(self) -> Part:
        return {
            "id": self.head["id"],
            "type": "message",
            "role": "assistant",
            "model": self.head["model"],
            "content": self._writer.parts,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _stop(self) -> Part:
        finish = self.output.finish
        assert finish is not None
        if finish.reason == FinishReason.LENGTH:
            full = self.generation.params.max_tokens < (self.body.max_tokens or 0)
            return {"stop_reason": "model_context_window_exceeded" if full else "max_tokens", "stop_sequence": None}
        if isinstance(finish.stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop}
        called = any(part["type"] == "tool_use" for part in self._writer.parts)
        return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}


class OpenBlock(OpenPart):
    def __init__(self, index: int, start: Part, key: str) -> None:
        self._index, self._start, self._key = index, start, key
        self._texts: list[str] = []
        self._broken = False  # its input is no JSON, and the rest of it is left out

    def begin(self) -> list[Part]:
        return [self._event("start", content_block=self._start)]

    def add(self, text: str, logprobs: list[Part]) -> list[Part]:  # noqa: ARG002
        added = self._input(text) if self._key == "partial_json" else text
        if not added:
            return []
        self._texts.append(added)
        return [self._event("delta", delta={"type": DELTAS[self._key], self._key: added})]

    def end(self, status: PartStatus) -> list[Part]:  # noqa: ARG002
        """Thoughts have an empty signature: nobody verifies it."""
        signature = {"type": "signature_delta", "signature": ""}
        signed = [self._event("delta", delta=signature)] if self._key == "thinking" else []
        return [*signed, self._event("stop")]

    def whole(self, status: PartStatus) -> Part:  # noqa: ARG002
        text = "".join(self._texts)
        return {**self._start, **({"input": partial(text) or {}} if self._key == "partial_json" else {self._key: text})}

    def _input(self, text: str) -> str:
        new = text if self._texts else text.lstrip()
        added = "" if self._broken else beginning("".join(self._texts), new)
        self._broken |= added != new
        return added

    def _event(self, what: str, **fields: Part) -> Part:
        return {"type": f"content_block_{what}", "index": self._index, **fields}


def open_block(call_id: Callable[[], str], index: int, piece: Piece) -> OpenBlock:
    if isinstance(piece, CallBegin):
        start = {"type": "tool_use", "id": CALL + call_id().removeprefix("call_"), "name": piece.name, "input": {}}
        return OpenBlock(index, start, "partial_json")
    if isinstance(piece, Reasoning):
        return OpenBlock(index, {"type": "thinking", "thinking": "", "signature": ""}, "thinking")
    return OpenBlock(index, {"type": "text", "text": ""}, "text")


def partial(text: str) -> Part | None:
    """The complete values of a JSON object's beginning, as Anthropic's clients read a stream; None without one."""
    if not text:
        return {}
    try:
        read = jiter.from_json(text.encode(), partial_mode=True)
    except ValueError:
        return None
    return read if isinstance(read, dict) else None


def beginning(before: str, text: str) -> str:
    """The part of `text` that, after `before`, still begins a JSON object: clients fail on anything else."""
    if partial(before + text) is not None:
        return text
    lengths = range(1, len(text) + 1)
    return text[: bisect_left(lengths, True, key=lambda length: partial(before + text[:length]) is None)]
