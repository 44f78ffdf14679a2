"""Events: `response.created`, `response.in_progress`, the events of items, `response.completed` or
`response.incomplete`; `error` and `response.failed` where the stream broke. Each event has a number."""

import time
from typing import Any

from msgspec import Struct, structs

from pilotfish.core.scheduling.request import FinishReason
from pilotfish.grammar.parsers.pieces import joined
from pilotfish.server.answers.event_format import EventFormat, PartStatus
from pilotfish.server.answers.formats import OutputBuffer, Part
from pilotfish.server.answers.logprobs import chat_logprob
from pilotfish.server.bodies.requests import AnyText
from pilotfish.server.http_errors import HttpError
from pilotfish.server.responses.response_body import NamespaceTool, ReasoningOptions, ResponsesRequest, TextOptions
from pilotfish.server.responses.response_chat import ResponseChat
from pilotfish.server.responses.response_events import ResponseItems
from pilotfish.server.responses.response_tools import offered_tools

#: Fields that no request can change.
ALWAYS: Part = {"background": False, "previous_response_id": None, "service_tier": "default", "store": False}
#: Fields that are repeated as they are.
SAME = ("instructions", "max_output_tokens", "max_tool_calls", "prompt_cache_key", "safety_identifier", "user")


class ResponseFormat(EventFormat):
    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.body, ResponseChat)
        self._repeated = repeated(self.body.asked)
        tools = {tool.name: tool for tool in offered_tools(self.body.asked)}
        self._items = ResponseItems(self.generation.reading.call_id, tools)
        self._seed: Part = {}
        self._sent = 0  # events

    def whole(self) -> Part:
        self._seed = self.seed(self.output)
        self._grown()
        return self._ended()

    def chunks(self, output: OutputBuffer) -> list[Part]:
        events = [*([] if output.begun else self._opening()), *self._grown()]
        if output.finish is not None:
            ended = self._ended()
            events.append({"type": f"response.{ended['status']}", "response": ended})
        return self._numbered(events)

    def failure(self, error: HttpError) -> list[Part]:
        told = {"code": error.code or "server_error", "message": str(error), "param": error.param}
        response = self._response("failed", output=self._items.parts, error={**told, "code": "server_error"})
        return self._numbered([{"type": "error", **told}, {"type": "response.failed", "response": response}])

    def usage(self) -> Part:
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self._cached().total(), "cache_write_tokens": 0},
            "output_tokens": self.output.tokens,
            "output_tokens_details": {"reasoning_tokens": self.output.reasoning_tokens},
            "total_tokens": self.prompt_tokens + self.output.tokens,
        }

    def _opening(self) -> list[Part]:
        self._seed = self.seed(self.output)
        empty = self._response("in_progress")
        return [{"type": f"response.{what}", "response": empty} for what in ("created", "in_progress")]

    def _grown(self) -> list[Part]:
        output = self.output
        if self.generation.params.logprobs is None:
            events = self._items.add(joined(output.pieces))
        else:
            scored = ((pieces, [chat_logprob(entry, self.names)] if entry else []) for pieces, entry in output.scored)
            events = [event for pieces, logprobs in scored for event in self._items.add(pieces, logprobs)]
        return events if output.finish is None else events + self._items.end(self._status)

    @property
    def _status(self) -> PartStatus:
        finish = self.output.finish
        return "incomplete" if finish is not None and finish.reason == FinishReason.LENGTH else "completed"

    def _ended(self) -> Part:
        incomplete = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        at = {"completed_at": int(time.time())} if incomplete is None else {}
        ended = {"output": self._items.parts, "incomplete_details": incomplete, "usage": self.usage()}
        return self._response(self._status, **ended, **at, **self.metrics())

    def _response(self, status: str, **known: Any) -> Part:
        params = self.generation.params
        return {
            "id": self.head["id"],
            "object": "response",
            "created_at": self.head["created"],
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.head["model"],
            "output": [],
            "temperature": params.temperature,
            "top_p": params.top_p,
            **self._repeated,
            "usage": None,
            **self._seed,
            **known,
        }

    def _numbered(self, events: list[Part]) -> list[Part]:
        first, self._sent = self._sent, self._sent + len(events)
        return [{**event, "sequence_number": number} for number, event in enumerate(events, first)]


def _without_left_out(tool: Struct) -> Struct:
    if not isinstance(tool, NamespaceTool):
        return tool
    return structs.replace(tool, tools=[each for each in tool.tools if each is not None])


def repeated(asked: ResponsesRequest) -> Part:
    text, reasoning = asked.text or TextOptions(), asked.reasoning or ReasoningOptions()
    return {
        **ALWAYS,
        **{name: getattr(asked, name) for name in SAME},
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "text": {"format": text.format or AnyText(), "verbosity": "medium"},
        "tool_choice": asked.tool_choice or "auto",
        "tools": [_without_left_out(tool) for tool in asked.tools or () if tool is not None],
        "top_logprobs": asked.top_logprobs or 0,
        "truncation": asked.truncation or "disabled",
    }
