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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from pilotfish.grammar.parsers.pieces import CallBegin, Content, Piece, Reasoning, content_of
from pilotfish.server.answers.event_format import OpenPart, PartStatus, PartWriter
from pilotfish.server.answers.formats import Part
from pilotfish.server.responses.response_body import CustomTool
from pilotfish.server.responses.response_tools import InputParser, OfferedTool


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
        if tool is not None and isinstance(tool.tool, CustomTool):
            return CustomCallItem(CUSTOM_CALL, index, self._call_id(), told)
        return CallItem(CALL, index, self._call_id(), told)
