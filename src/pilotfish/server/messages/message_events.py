"""Content blocks of Anthropic's Messages API, made of the pieces of an output: a state machine without I/O.

    Content                ─► a block `text`         content_block_start, content_block_delta …, content_block_stop
    Reasoning              ─► a block `thinking`
    CallBegin, Arguments   ─► a block `tool_use`

Each block ends where the next one begins.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jiter

from pilotfish.grammar.parsers.pieces import Arguments, CallBegin, Content, Piece, Reasoning

#: An object of the API.
Part = dict[str, Any]
#: Types of deltas, by the field that holds their text.
DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "partial_json": "input_json_delta"}


@dataclass
class OpenBlock:
    """A block to which pieces are added."""

    start: Part  # as its first event has it: empty
    key: str  # of DELTAS
    texts: list[str] = field(default_factory=list)
    broken: bool = False  # its input is no JSON, and what still comes of it is left out

    def add(self, text: str) -> str:
        """What of the text belongs to the block."""
        added = self._input(text) if self.key == "partial_json" else text
        if added:
            self.texts.append(added)
        return added

    def _input(self, text: str) -> str:
        new = text if self.texts else text.lstrip()
        added = "" if self.broken else beginning("".join(self.texts), new)
        self.broken |= added != new
        return added

    @property
    def whole(self) -> Part:
        text = "".join(self.texts)
        return {**self.start, **({"input": partial(text) or {}} if self.key == "partial_json" else {self.key: text})}


class BlockWriter:
    """`blocks` are those that have ended; `add` and `finish` give the events of a stream."""

    def __init__(self, call_id: Callable[[], str]) -> None:
        self.blocks: list[Part] = []
        self._call_id = call_id
        self._open: OpenBlock | None = None

    @property
    def called(self) -> bool:
        """Whether a tool was called."""
        return any(block["type"] == "tool_use" for block in self.blocks)

    def add(self, pieces: Iterable[Piece]) -> list[Part]:
        return [event for piece in pieces for event in self._add(piece)]

    def finish(self) -> list[Part]:
        """The output, and with it the block, has ended. The signature of thoughts is empty: nobody verifies it."""
        if self._open is None:
            return []
        signed = self._open.key == "thinking"
        events = [self._delta({"type": "signature_delta", "signature": ""})] if signed else []
        events.append({"type": "content_block_stop", "index": len(self.blocks)})
        self.blocks.append(self._open.whole)
        self._open = None
        return events

    def _add(self, piece: Piece) -> list[Part]:
        match piece:
            case CallBegin(name=name):
                return self._begin(
                    {"type": "tool_use", "id": self._call_id(), "name": name, "input": {}}, "partial_json"
                )
            case Arguments(text=text):
                return self._append(text)
            case Reasoning(text=text):
                return self._go_on({"type": "thinking", "thinking": "", "signature": ""}, "thinking", text)
            case Content(text=text):
                return self._go_on({"type": "text", "text": ""}, "text", text)

    def _begin(self, start: Part, key: str) -> list[Part]:
        events = self.finish()
        self._open = OpenBlock(start, key)
        return [*events, {"type": "content_block_start", "index": len(self.blocks), "content_block": start}]

    def _go_on(self, start: Part, key: str, text: str) -> list[Part]:
        """With the open block if it is of that kind."""
        if not text:
            return []
        same = self._open is not None and self._open.key == key
        return ([] if same else self._begin(start, key)) + self._append(text)

    def _append(self, text: str) -> list[Part]:
        added = "" if self._open is None else self._open.add(text)
        if self._open is None or not added:
            return []
        return [self._delta({"type": DELTAS[self._open.key], self._open.key: added})]

    def _delta(self, delta: Part) -> Part:
        return {"type": "content_block_delta", "index": len(self.blocks), "delta": delta}


def partial(text: str) -> Part | None:
    """The beginning of a JSON object, without values that are not complete, as Anthropic's clients read that of a
    stream. None where no object begins so."""
    if not text:
        return {}
    try:
        read = jiter.from_json(text.encode(), partial_mode=True)
    except ValueError:
        return None
    return read if isinstance(read, dict) else None


def beginning(before: str, text: str) -> str:
    """As much of `text` as goes on with `before` to the beginning of a JSON object: clients fail on anything else."""
    if partial(before + text) is not None:
        return text
    lengths = range(1, len(text) + 1)
    return text[: bisect_left(lengths, True, key=lambda length: partial(before + text[:length]) is None)]
