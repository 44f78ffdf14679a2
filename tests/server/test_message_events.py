"""Pieces become the same blocks however they are cut, and the official client makes these of the events."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations, count
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import ContentBlock, RawMessageStreamEvent
from pydantic import TypeAdapter
from sizes import sized

from pilotfish.grammar.parsers.pieces import Arguments, CallBegin, Content, Piece, Reasoning
from pilotfish.server.answers.event_format import PartWriter
from pilotfish.server.messages.message_format import Part, beginning, open_block, partial

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
BLOCK: TypeAdapter[Any] = TypeAdapter(ContentBlock)
EMPTY = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "tiny",
    "content": [],
    "usage": {"input_tokens": 1, "output_tokens": 0},
}


def text(said: str) -> Part:
    return {"type": "text", "text": said}


def thought(said: str) -> Part:
    return {"type": "thinking", "thinking": said, "signature": ""}


def call(number: int, name: str, **arguments: Any) -> Part:
    return {"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": arguments}


#: Outputs and their blocks.
OUTPUTS: dict[str, tuple[list[Piece], list[Part]]] = {
    "nothing": ([], []),
    "text": ([Content("Hello ☃ there")], [text("Hello ☃ there")]),
    "white space": ([Content(" \n\n ")], [text(" \n\n ")]),
    "white space before text": ([Content("\n\n  x ")], [text("\n\n  x ")]),
    "thought": ([Reasoning("hm, so")], [thought("hm, so")]),
    "thought and text": ([Reasoning("hm"), Content("\n\nYes.")], [thought("hm"), text("\n\nYes.")]),
    "call": ([CallBegin(0, "f"), Arguments(0, '{"a": 1, "b": "x"}')], [call(0, "f", a=1, b="x")]),
    "call without arguments": ([CallBegin(0, "f")], [call(0, "f")]),
    "call with an empty object": ([CallBegin(0, "f"), Arguments(0, "{}")], [call(0, "f")]),
    "calls": (
        [CallBegin(0, "f"), Arguments(0, '{"a": [1, {"b": "☃"}]}'), CallBegin(1, "g"), Arguments(1, '{"c": null}')],
        [call(0, "f", a=[1, {"b": "☃"}]), call(1, "g", c=None)],
    ),
    "all": (
        [
            *(Reasoning("hm"), Content("Let me see.\n"), CallBegin(0, "f")),
            *(Arguments(0, '{"a": 1}'), CallBegin(1, "f"), Arguments(1, '{"a": 2}')),
        ],
        [thought("hm"), text("Let me see.\n"), call(0, "f", a=1), call(1, "f", a=2)],
    ),
    "text after a call": ([CallBegin(0, "f"), Arguments(0, "{}"), Content(" and so")], [call(0, "f"), text(" and so")]),
    "cut in a text": ([CallBegin(0, "f"), Arguments(0, '{"a": 1, "b": "x')], [call(0, "f", a=1)]),
    "cut in a name": ([CallBegin(0, "f"), Arguments(0, '{"a": {"b": 1, "c')], [call(0, "f", a={"b": 1})]),
    "cut in an escape": ([CallBegin(0, "f"), Arguments(0, '{"a": [2], "b": "\\u00')], [call(0, "f", a=[2])]),
    "no JSON from its beginning": ([CallBegin(0, "f"), Arguments(0, "{a: 1}")], [call(0, "f")]),
    "no JSON from its middle": ([CallBegin(0, "f"), Arguments(0, '{"a": 1, b: 2, "c": 3}')], [call(0, "f", a=1)]),
    "no JSON at its end": ([CallBegin(0, "f"), Arguments(0, '{"a": [1, ]}, 2')], [call(0, "f", a=[1])]),
    "no object": ([CallBegin(0, "f"), Arguments(0, '[{"a": 1}]'), Content("x")], [call(0, "f"), text("x")]),
    "white space around an object": ([CallBegin(0, "f"), Arguments(0, ' \n{"a": 1}\n ')], [call(0, "f", a=1)]),
    "cut at the beginning": ([CallBegin(0, "f"), Arguments(0, "{")], [call(0, "f")]),
}
each_output = pytest.mark.parametrize(("pieces", "blocks"), OUTPUTS.values(), ids=OUTPUTS)


def streamed(parts: Iterable[Iterable[Piece]]) -> tuple[list[Part], list[Part]]:
    """Events, and the blocks."""
    numbers = count()
    made = PartWriter(lambda index, piece: open_block(lambda: f"call_{next(numbers)}", index, piece))
    events = [event for pieces in parts for event in made.add(pieces)]
    return events + made.end(), made.parts


def accumulated(events: list[Part]) -> list[Part]:
    """The blocks that the official client makes of a stream."""
    buffers: dict[int, bytes] = {}
    snapshot = None
    for event in [{"type": "message_start", "message": EMPTY}, *events]:
        snapshot = accumulate_event(event=EVENT.validate_python(event), current_snapshot=snapshot, json_bufs=buffers)
    assert snapshot is not None
    return [block.to_dict() for block in snapshot.content]


def cut(pieces: list[Piece], places: set[int]) -> Iterator[Piece]:
    at = 0
    for piece in pieces:
        if isinstance(piece, CallBegin):
            yield piece
            continue
        start = 0
        for end in range(len(piece.text) + 1):
            if at + end in places:
                yield replace(piece, text=piece.text[start:end])  # may be empty
                start = end
        yield replace(piece, text=piece.text[start:])
        at += len(piece.text)


@each_output
def test_blocks_however_pieces_are_cut(pieces: list[Piece], blocks: list[Part]) -> None:
    """All at once, cut at each place, at two of them, and everywhere."""
    events, made = streamed([pieces])
    assert made == blocks == accumulated(events)
    assert [BLOCK.validate_python(block).to_dict() for block in made] == blocks
    length = sum(len(getattr(piece, "text", "")) for piece in pieces)
    cuts = [
        set(range(length)),
        *(set(places) for n in sized([1], [1, 2]) for places in combinations(range(length + 1), n)),
    ]
    for places in cuts:
        events, made = streamed([piece] for piece in cut(pieces, places))
        assert made == blocks == accumulated(events), places


@each_output
def test_the_order_of_events(pieces: list[Piece], blocks: list[Part]) -> None:
    """Block by block: a start, deltas with something in them, a stop."""
    events, _ = streamed([[piece] for piece in pieces])
    names = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
    for index, block in enumerate(blocks):
        own = [event for event in events if event["index"] == index]
        assert own == events[: len(own)] or index > 0
        start, *deltas, stop = own
        assert start["type"] == "content_block_start" and start["content_block"]["type"] == block["type"]
        assert stop == {"type": "content_block_stop", "index": index}
        if block["type"] == "thinking":
            assert deltas.pop()["delta"] == {"type": "signature_delta", "signature": ""}
        assert all(event["delta"]["type"] == names[block["type"]] for event in deltas)
        assert all("" not in event["delta"].values() for event in deltas)
    assert [event["index"] for event in events] == sorted(event["index"] for event in events)
    assert {event["index"] for event in events} == set(range(len(blocks)))


@pytest.mark.parametrize("words", ["nul", "[1, 2", '"text"', "12", '{"a": 1, }', "{a: 1}", '{"a":' * 300])
def test_what_begins_no_object(words: str) -> None:
    assert partial(words) is None and len(beginning("", words)) < len(words)


@pytest.mark.parametrize(
    "words", ["", "{", '{"a": -1.5e+3, "b": [true, null]}', '{"\\ud83d\\ude00": "☃ \\" \\u2603"}', "{} and more"]
)
def test_every_beginning_of_an_object_is_one(words: str) -> None:
    assert all(partial(words[:length]) is not None for length in range(len(words) + 1))
    assert beginning("", words) == words
