"""Answers of Anthropic's Messages API, whole or as the events of a stream:

message_start                          the message, still empty, and what of its prompt was cached
content_block_start, …_delta, …_stop   of each block: `message_events`
message_delta, message_stop            why it ended, and the whole usage
error                                  in place of the last two where the stream broke
"""

from __future__ import annotations

from typing import Any

from pilotfish.core.scheduling.request import FinishReason
from pilotfish.server.answers.formats import AnswerFormat, Part, named_event
from pilotfish.server.answers.logprobs import TokenNames
from pilotfish.server.answers.stream import OutputBuffer
from pilotfish.server.bodies.params import Generation
from pilotfish.server.http_errors import HttpError
from pilotfish.server.messages.message_chat import CALL
from pilotfish.server.messages.message_errors import body_of
from pilotfish.server.messages.message_events import BlockWriter
from pilotfish.server.responses.response_tokens import TokenBuffer


class MessageFormat(AnswerFormat):
    """Of one output."""

    end_of_stream = b""
    buffer = TokenBuffer

    def __init__(self, generation: Generation, tokenizer: Any, token_text: TokenNames) -> None:
        super().__init__(generation, tokenizer, token_text)
        (output,) = self.outputs
        assert isinstance(output, TokenBuffer)
        self._output = output
        call_id = generation.reading.call_id
        self._writer = BlockWriter(lambda: CALL + call_id().removeprefix("call_"))

    def whole(self) -> Part:
        self._written(self._output)
        return {
            **self._message(self._writer.blocks),
            **self._ended(self._output),
            "usage": self.usage(),
            **self.metrics(),
        }

    def chunks(self, output: OutputBuffer) -> list[Part]:
        opening = [] if output.begun else [{"type": "message_start", "message": self._opened()}]
        events = opening + self._written(output)
        if output.finish is None:
            return events
        ended = {"type": "message_delta", "delta": self._ended(output), "usage": self.usage(), **self.metrics()}
        return [*events, ended, {"type": "message_stop"}]

    def failure(self, error: HttpError) -> list[Part]:
        return [body_of(error, self.head["id"].removeprefix(self.body.id_prefix))]

    def encoded(self, event: Part) -> bytes:
        return named_event(event)

    def usage(self) -> Part:
        """Tokens of the prompt that were cached count apart from the others."""
        return {**self._input_usage(), **_output_usage(self._output.tokens, self._output.reasoning_tokens)}

    def _input_usage(self) -> Part:
        cached = self._cached().total()
        return {
            "input_tokens": len(self.generation.prompts[0].tokens) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
        }

    def _written(self, output: OutputBuffer) -> list[Part]:
        """Events of what was added to the output."""
        events = self._writer.add(output.pieces)
        return events if output.finish is None else events + self._writer.finish()

    def _message(self, blocks: list[Part]) -> Part:
        return {
            "id": self.head["id"],
            "type": "message",
            "role": "assistant",
            "model": self.head["model"],
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _opened(self) -> Part:
        """The output's tokens are told at the end."""
        return {**self._message([]), "usage": {**self._input_usage(), **_output_usage(0, 0)}}

    def _ended(self, output: OutputBuffer) -> Part:
        assert output.finish is not None
        reason, stop = output.finish.reason, output.finish.stop
        if reason == FinishReason.LENGTH:
            full = self.generation.params.max_tokens < (self.body.max_tokens or 0)
            return {"stop_reason": "model_context_window_exceeded" if full else "max_tokens", "stop_sequence": None}
        if isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": "tool_use" if self._writer.called else "end_turn", "stop_sequence": None}


def _output_usage(tokens: int, thinking: int) -> Part:
    return {"output_tokens": tokens, "output_tokens_details": {"thinking_tokens": thinking}}
