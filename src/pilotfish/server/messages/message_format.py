"""Events: `message_start`, those of blocks, `message_delta` with the usage, `message_stop`; or `error` at the end."""

from functools import partial

from pilotfish.core.scheduling.request import FinishReason
from pilotfish.server.answers.event_format import EventFormat, PartWriter
from pilotfish.server.answers.formats import OutputBuffer, Part
from pilotfish.server.http_errors import HttpError
from pilotfish.server.messages.message_chat import CALL
from pilotfish.server.messages.message_events import open_block


class MessageFormat(EventFormat):
    def __post_init__(self) -> None:
        super().__post_init__()
        call_id = self.generation.reading.call_id
        self._writer = PartWriter(partial(open_block, lambda: CALL + call_id().removeprefix("call_")))

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
