"""Events: `response.created`, `response.in_progress`, the events of items, `response.completed` or
`response.incomplete`; `error` and `response.failed` where the stream broke. Each event has a number."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from msgspec import Struct, structs

from pilotfish.core.scheduling.request import FinishReason
from pilotfish.grammar.parsers.pieces import CallBegin, Content, Piece, Reasoning, content_of, joined
from pilotfish.server.answers.event_format import EventFormat, OpenPart, PartStatus, PartWriter
from pilotfish.server.answers.formats import OutputBuffer, Part, chat_logprob
from pilotfish.server.bodies.requests import AnyText
from pilotfish.server.http_errors import HttpError
from pilotfish.server.responses import response_body
from pilotfish.server.responses.response_chat import InputParser, OfferedTool, ResponseChat, offered_tools


@dataclass(frozen=True)
class ItemKind:
    type: str
    prefix: str  # of its id
    text: str  # its events begin so
    key: str = ""  # of a call's text in its item


REASONING = ItemKind("reasoning", "rs", "reasoning_text")
MESSAGE = ItemKind("message", "msg", "output_text")
CALL = ItemKind("function_call", "fc", "function_call_arguments", "arguments")
CUSTOM_CALL = ItemKind("custom_tool_call", "ctc", "custom_tool_call_input", "input")


class Item(OpenPart):
    def __init__(self, kind: ItemKind, index: int) -> None:
        self.kind, self.index = kind, index  # in the response's output
        self.id = f"{kind.prefix}_{token_hex(24)}"
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def begin(self) -> list[Part]:
        return [self._told("added", self.whole("in_progress"))]

    def end(self, status: PartStatus) -> list[Part]:
        return [*self._done(), self._told("done", self.whole(status))]

    def whole(self, status: PartStatus) -> Part:
        return {"id": self.id, "type": self.kind.type, "status": status, **self._own()}

    def _own(self) -> Part:
        raise NotImplementedError

    def _done(self) -> list[Part]:
        raise NotImplementedError

    def _told(self, what: str, item: Part) -> Part:
        return {"type": f"response.output_item.{what}", "output_index": self.index, "item": item}

    def _event(self, what: str, **fields: Any) -> Part:
        return {"type": f"response.{what}", "item_id": self.id, "output_index": self.index, **fields}


class TextItem(Item):
    def __init__(self, kind: ItemKind, index: int) -> None:
        super().__init__(kind, index)
        self._logprobs: list[Part] = []

    def begin(self) -> list[Part]:
        added = self._told("added", {**self.whole("in_progress"), "content": []})
        return [added, self._event("content_part.added", content_index=0, part=self._part())]

    def add(self, text: str, logprobs: list[Part]) -> list[Part]:
        self._texts.append(text)
        self._logprobs += logprobs
        return [self._event(f"{self.kind.text}.delta", content_index=0, delta=text, **self._scores(logprobs))]

    def _own(self) -> Part:
        first: Part = {"role": "assistant"} if self.kind is MESSAGE else {"summary": []}
        return {**first, "content": [self._part()]}

    def _done(self) -> list[Part]:
        scores = self._scores(self._logprobs)
        text = self._event(f"{self.kind.text}.done", content_index=0, text=self.text, **scores)
        return [text, self._event("content_part.done", content_index=0, part=self._part())]

    def _part(self) -> Part:
        notes: Part = {"annotations": []} if self.kind is MESSAGE else {}
        return {"type": self.kind.text, "text": self.text, **notes, **self._scores(self._logprobs)}

    def _scores(self, logprobs: list[Part]) -> Part:
        return {"logprobs": list(logprobs)} if self.kind is MESSAGE else {}


class CallItem(Item):
    def __init__(self, kind: ItemKind, index: int, call_id: str, told: Mapping[str, str]) -> None:
        super().__init__(kind, index)
        self._call_id, self._named = call_id, told

    def add(self, text: str, logprobs: list[Part]) -> list[Part]:  # noqa: ARG002
        self._texts.append(text)
        return [self._event(f"{self.kind.text}.delta", delta=text)] if text else []

    def _own(self) -> Part:
        return {"call_id": self._call_id, **self._named, self.kind.key: self.text}

    def _done(self) -> list[Part]:
        return [self._event(f"{self.kind.text}.done", name=self._named["name"], arguments=self.text)]


class CustomCallItem(CallItem):
    def __init__(self, kind: ItemKind, index: int, call_id: str, told: Mapping[str, str]) -> None:
        super().__init__(kind, index, call_id, told)
        self._parser = InputParser()

    def add(self, text: str, logprobs: list[Part]) -> list[Part]:
        return super().add(content_of(self._parser.feed(text)), logprobs)

    def end(self, status: PartStatus) -> list[Part]:
        return [*super().add(content_of(self._parser.finish()), []), *super().end(status)]

    def _done(self) -> list[Part]:
        return [self._event(f"{self.kind.text}.done", input=self.text)]


class ResponseItems(PartWriter):
    """The items of a response and the events of its stream.

    pieces   Reasoning  Reasoning     Content  Content     CallBegin  Arguments  Arguments     end
    item     reasoning                message              function_call, or custom_tool_call
    events   output_item.added        output_item.added    output_item.added
             content_part.added       content_part.added   function_call_arguments.delta
             reasoning_text.delta     output_text.delta    function_call_arguments.delta
             reasoning_text.delta     output_text.delta    function_call_arguments.done
             reasoning_text.done      output_text.done     output_item.done
             content_part.done        content_part.done
             output_item.done         output_item.done
    """

    def __init__(self, call_id: Callable[[], str], tools: Mapping[str, OfferedTool]) -> None:
        super().__init__(self._made)
        self._call_id, self._tools = call_id, tools

    def end(self, status: PartStatus = "completed") -> list[Part]:
        begun = [] if self.parts else self.begin(Content(""))
        return [*begun, *super().end(status)]

    def _made(self, index: int, piece: Piece) -> Item:
        if not isinstance(piece, CallBegin):
            return TextItem(REASONING if isinstance(piece, Reasoning) else MESSAGE, index)
        tool = self._tools.get(piece.name)  # none: the model calls what it was not offered
        told = {"name": piece.name} if tool is None else tool.told
        if tool is not None and isinstance(tool.tool, response_body.CustomTool):
            return CustomCallItem(CUSTOM_CALL, index, self._call_id(), told)
        return CallItem(CALL, index, self._call_id(), told)


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
    if not isinstance(tool, response_body.NamespaceTool):
        return tool
    return structs.replace(tool, tools=[each for each in tool.tools if each is not None])


def repeated(asked: response_body.ResponsesRequest) -> Part:
    text = asked.text or response_body.TextOptions()
    reasoning = asked.reasoning or response_body.ReasoningOptions()
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
