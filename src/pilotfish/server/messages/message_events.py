from bisect import bisect_left
from collections.abc import Callable

import jiter

from pilotfish.grammar.parsers.pieces import CallBegin, Piece, Reasoning
from pilotfish.server.answers.event_format import OpenPart, PartStatus
from pilotfish.server.answers.formats import Part

#: Types of deltas, by the field that holds their text.
DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "partial_json": "input_json_delta"}


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
        start = {"type": "tool_use", "id": call_id(), "name": piece.name, "input": {}}
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
