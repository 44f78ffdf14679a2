"""The items of a response and the events of its stream, made of an output's pieces.

pieces   Reasoning  Reasoning     Content  Content     CallBegin  Arguments  Arguments     end
item     reasoning                message              function_call, or custom_tool_call
events   output_item.added        output_item.added    output_item.added
         content_part.added       content_part.added   function_call_arguments.delta
         reasoning_text.delta     output_text.delta    function_call_arguments.delta
         reasoning_text.delta     output_text.delta    function_call_arguments.done
         reasoning_text.done      output_text.done     output_item.done
         content_part.done        content_part.done
         output_item.done         output_item.done

An item ends where a piece of another kind comes. Only the number of deltas depends on how an output was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from secrets import token_hex
from typing import Any, ClassVar, Literal, TypeAlias

from pilotfish.grammar.parsers.pieces import Arguments, CallBegin, Content, Piece, Reasoning
from pilotfish.server.responses.response_tools import InputReader, OfferedTool

#: An event, an item, or a part of one.
Part = dict[str, Any]
ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class Item:
    """An item that grows. Subclasses say what it is made of."""

    prefix: ClassVar[str]  # of its id

    def __init__(self, index: int) -> None:
        self.index = index  # in the response's output
        self.id = f"{self.prefix}_{token_hex(24)}"
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def begin(self) -> list[Part]:
        return [self._told("added", self.item("in_progress"))]

    def add(self, text: str, logprobs: list[Part]) -> list[Part]:
        """The event of a delta, or none yet."""
        raise NotImplementedError

    def end(self, status: ItemStatus) -> list[Part]:
        return [*self._last(), self._told("done", self.item(status))]

    def item(self, status: ItemStatus) -> Part:
        """The item as it stands."""
        raise NotImplementedError

    def _last(self) -> list[Part]:
        """The events that say all of its text, before the one that says all of the item."""
        raise NotImplementedError

    def _told(self, what: str, item: Part) -> Part:
        return {"type": f"response.output_item.{what}", "output_index": self.index, "item": item}

    def _event(self, what: str, **fields: Any) -> Part:
        return {"type": f"response.{what}", "item_id": self.id, "output_index": self.index, **fields}


class TextItem(Item):
    """An item with one part, a text."""

    part_type: ClassVar[str]

    def begin(self) -> list[Part]:
        opening = self._event("content_part.added", content_index=0, part=self._part("", []))
        return [self._told("added", self._item("in_progress", [])), opening]

    def add(self, text: str, logprobs: list[Part]) -> list[Part]:  # noqa: ARG002
        self._texts.append(text)
        return [self._event(f"{self.part_type}.delta", content_index=0, delta=text)]

    def item(self, status: ItemStatus) -> Part:
        return self._item(status, [self._whole()])

    def _last(self) -> list[Part]:
        text = self._event(f"{self.part_type}.done", content_index=0, text=self.text)
        return [text, self._event("content_part.done", content_index=0, part=self._whole())]

    def _whole(self) -> Part:
        return self._part(self.text, [])

    def _part(self, text: str, logprobs: list[Part]) -> Part:  # noqa: ARG002
        return {"type": self.part_type, "text": text}

    def _item(self, status: ItemStatus, content: list[Part]) -> Part:
        raise NotImplementedError


class ReasoningItem(TextItem):
    prefix = "rs"
    part_type = "reasoning_text"

    def _item(self, status: ItemStatus, content: list[Part]) -> Part:
        return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}


class MessageItem(TextItem):
    prefix = "msg"
    part_type = "output_text"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._logprobs: list[Part] = []

    def add(self, text: str, logprobs: list[Part]) -> list[Part]:
        self._logprobs += logprobs
        return [{**event, "logprobs": logprobs} for event in super().add(text, logprobs)]

    def _last(self) -> list[Part]:
        text, part = super()._last()
        return [{**text, "logprobs": self._logprobs}, part]

    def _whole(self) -> Part:
        return self._part(self.text, self._logprobs)

    def _part(self, text: str, logprobs: list[Part]) -> Part:
        return {**super()._part(text, logprobs), "annotations": [], "logprobs": logprobs}

    def _item(self, status: ItemStatus, content: list[Part]) -> Part:
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}


class CallItem(Item):
    prefix = "fc"

    def __init__(self, index: int, call_id: str, told: Mapping[str, str]) -> None:
        """`told`: the function's name, and its namespace if it has one."""
        super().__init__(index)
        self.call_id, self.told = call_id, told

    def add(self, text: str, logprobs: list[Part]) -> list[Part]:  # noqa: ARG002
        self._texts.append(text)
        return [self._event("function_call_arguments.delta", delta=text)]

    def item(self, status: ItemStatus) -> Part:
        call = {"call_id": self.call_id, **self.told, "arguments": self.text}
        return {"id": self.id, "type": "function_call", "status": status, **call}

    def _last(self) -> list[Part]:
        return [self._event("function_call_arguments.done", name=self.told["name"], arguments=self.text)]


class CustomCallItem(CallItem):
    """Its input is the one argument of the call that the model writes."""

    prefix = "ctc"

    def __init__(self, index: int, call_id: str, told: Mapping[str, str]) -> None:
        super().__init__(index, call_id, told)
        self._reader = InputReader()

    def add(self, text: str, logprobs: list[Part]) -> list[Part]:  # noqa: ARG002
        return self._grown(self._reader.feed(text))

    def item(self, status: ItemStatus) -> Part:
        call = {"call_id": self.call_id, **self.told, "input": self.text}
        return {"id": self.id, "type": "custom_tool_call", "status": status, **call}

    def end(self, status: ItemStatus) -> list[Part]:
        return [*self._grown(self._reader.finish()), *super().end(status)]

    def _last(self) -> list[Part]:
        return [self._event("custom_tool_call_input.done", input=self.text)]

    def _grown(self, new: str) -> list[Part]:
        self._texts.append(new)
        return [self._event("custom_tool_call_input.delta", delta=new)] if new else []


class ResponseItems:
    """Follows one output. Each method gives the events of what it adds."""

    def __init__(self, call_id: Callable[[], str], tools: Mapping[str, OfferedTool]) -> None:
        """`call_id` makes the ids of calls. `tools`, by the names that the model knows them by."""
        self._call_id, self._tools = call_id, tools
        self._ended: list[Part] = []
        self._open: Item | None = None
        self._logprobs: list[Part] = []  # of tokens whose text has not come yet

    @property
    def items(self) -> list[Part]:
        """As they stand; all have ended after `end`."""
        return [*self._ended, *([] if self._open is None else [self._open.item("incomplete")])]

    def add(self, pieces: Iterable[Piece], logprobs: Iterable[Part] = ()) -> list[Part]:
        """`logprobs` are those of the tokens that the pieces end with."""
        self._logprobs += logprobs
        return [event for piece in pieces for event in self._piece(piece)]

    def end(self, status: ItemStatus) -> list[Part]:
        """No more pieces come. The last item has the response's status. There is a message where there was nothing."""
        begun = [] if self._next else self._begin(MessageItem(0))
        left = self._text("") if self._logprobs and isinstance(self._open, MessageItem) else []
        return [*begun, *left, *self._end(status)]

    def _piece(self, piece: Piece) -> list[Part]:
        match piece:
            case Content(text) if isinstance(self._open, MessageItem):
                begun = []
            case Content(text):
                self._logprobs = _covering(self._logprobs, text)
                begun = self._begin(MessageItem(self._next))
            case Reasoning(text):
                begun = [] if isinstance(self._open, ReasoningItem) else self._begin(ReasoningItem(self._next))
            case CallBegin(name=name):
                begun, text = self._begin(self._call(name)), ""
            case Arguments(text=text):
                begun = []
        return [*begun, *(self._text(text) if text else [])]

    def _call(self, name: str) -> CallItem:
        tool = self._tools.get(name)  # none: the model calls what it was not offered
        told = {"name": name} if tool is None else tool.told
        kind = CustomCallItem if tool is not None and tool.is_custom else CallItem
        return kind(self._next, self._call_id(), told)

    @property
    def _next(self) -> int:
        """The index of the next item."""
        return len(self._ended) + (self._open is not None)

    def _begin(self, item: Item) -> list[Part]:
        ended = self._end("completed")
        self._open = item
        return [*ended, *item.begin()]

    def _text(self, text: str) -> list[Part]:
        assert self._open is not None
        logprobs, self._logprobs = self._logprobs, []
        return self._open.add(text, logprobs)

    def _end(self, status: ItemStatus) -> list[Part]:
        if self._open is None:
            return []
        ended, self._open = self._open, None
        events = ended.end(status)
        self._ended.append(ended.item(status))
        return events


def _covering(logprobs: list[Part], text: str) -> list[Part]:
    """The last of them whose tokens cover a text: those before are of marks."""
    missing, first = len(text.encode()), len(logprobs)
    while first and missing > 0:
        first -= 1
        missing -= len(logprobs[first]["bytes"])
    return logprobs[first:]
