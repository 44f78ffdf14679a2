"""The events of a response: OpenAI's types allow each, and together they say what the items say, however the output was
cut into pieces."""

from itertools import count
from typing import Any

import pytest
from openai.types.responses import ResponseOutputItem, ResponseStreamEvent
from pydantic import TypeAdapter

from pilotfish.grammar.parsers.pieces import Arguments, CallBegin, Content, Piece, Reasoning
from pilotfish.server.responses.response_format import ResponseItems

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseOutputItem)
OUTPUTS: dict[str, list[Piece]] = {
    "text": [Content("Hello ☃ there")],
    "reasoning": [Reasoning("I think"), Content("so")],
    "only reasoning": [Reasoning("I th")],
    "call": [CallBegin(0, "f"), Arguments(0, '{"a": 1}')],
    "calls": [CallBegin(0, "f"), Arguments(0, '{"a": 1}'), CallBegin(1, "g"), Arguments(1, "{}")],
    "cut call": [CallBegin(0, "f")],
    "text around a call": [Content("Well, "), CallBegin(0, "f"), Arguments(0, '{"b": [2]}'), Content("done")],
    "all": [
        *(Reasoning("hm"), Content("Yes"), CallBegin(0, "f")),
        *(Arguments(0, "{}"), CallBegin(1, "f"), Arguments(1, "{}")),
    ],
    "nothing": [],
}


def response_items() -> ResponseItems:
    numbers = count()
    return ResponseItems(lambda: f"call_{next(numbers)}", {})


def followed(pieces: list[Piece], status: Any = "completed") -> tuple[list[Any], list[Any]]:
    """Events and items, without the ids, which are drawn; each event is checked by OpenAI's types."""
    items = response_items()
    events = [event for piece in pieces for event in items.add([piece])] + items.end(status)
    for number, event in enumerate(events):
        EVENT.validate_python({**event, "sequence_number": number}, strict=True)
    for item in items.parts:
        ITEM.validate_python(item, strict=True)
    check_ids(events, items.parts)
    return events, [without_ids(item) for item in items.parts]


def check_ids(events: list[Any], items: list[Any]) -> None:
    assert len({item["id"] for item in items}) == len(items)
    calls = [item["call_id"] for item in items if item["type"] == "function_call"]
    assert len(set(calls)) == len(calls)
    for event in events:
        told = event["item"]["id"] if "item" in event else event["item_id"]
        assert told == items[event["output_index"]]["id"]
        if event["type"] == "response.output_item.done":
            assert event["item"] == items[event["output_index"]]


def without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def cut(piece: Piece, at: int) -> list[Piece]:
    """A piece as two; a call's beginning is whole."""
    match piece:
        case CallBegin():
            return [piece]
        case Arguments(index, text):
            return [Arguments(index, text[:at]), Arguments(index, text[at:])]
        case Content(text):
            return [Content(text[:at]), Content(text[at:])]
        case Reasoning(text):
            return [Reasoning(text[:at]), Reasoning(text[at:])]


def rebuilt(events: list[Any]) -> list[Any]:
    """The items as a client puts them together from deltas alone."""
    items: list[Any] = []
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
                items.append({**event["item"]})
            case "content_part.added":
                assert event["content_index"] == len(items[-1]["content"]) == 0
                items[-1]["content"] = [{**event["part"]}]
            case "output_text.delta" | "reasoning_text.delta":
                items[-1]["content"][0]["text"] += event["delta"]
                if "logprobs" in event:
                    items[-1]["content"][0]["logprobs"] = items[-1]["content"][0]["logprobs"] + event["logprobs"]
            case "function_call_arguments.delta":
                items[-1]["arguments"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == items[-1]["content"][0]["text"]
                assert event.get("logprobs") == items[-1]["content"][0].get("logprobs")
            case "content_part.done":
                assert event["part"] == items[-1]["content"][0]
            case "function_call_arguments.done":
                assert (event["arguments"], event["name"]) == (items[-1]["arguments"], items[-1]["name"])
            case "output_item.done":
                items[-1]["status"] = event["item"]["status"]
                assert event["item"] == items[-1]
    return [without_ids(item) for item in items]


@pytest.mark.parametrize("pieces", OUTPUTS.values(), ids=OUTPUTS)
def test_events_say_what_the_items_say_however_pieces_are_cut(pieces: list[Piece]) -> None:
    for status in ("incomplete", "completed"):
        events, items = followed(pieces, status)
        assert rebuilt(events) == items
        assert [item["status"] for item in items] == ["completed"] * (len(items) - 1) + [status]
    fixed = [event["type"] for event in events if not event["type"].endswith("delta")]
    for i, piece in enumerate(pieces):
        for at in range(len(getattr(piece, "text", "")) + 1):
            told, same = followed([*pieces[:i], *cut(piece, at), *pieces[i + 1 :]])
            assert same == items and rebuilt(told) == items
            assert [event["type"] for event in told if not event["type"].endswith("delta")] == fixed


def test_the_items_of_an_output() -> None:
    _, items = followed(OUTPUTS["all"])
    part = {"type": "output_text", "text": "Yes", "annotations": [], "logprobs": []}
    call = {"type": "function_call", "status": "completed", "name": "f", "arguments": "{}"}
    thought = [{"type": "reasoning_text", "text": "hm"}]
    assert items == [
        {"type": "reasoning", "status": "completed", "summary": [], "content": thought},
        {"type": "message", "status": "completed", "role": "assistant", "content": [part]},
        call,
        call,
    ]


def test_an_output_of_nothing_is_an_empty_message() -> None:
    events, items = followed([])
    assert items[0]["content"][0]["text"] == "" and not any(event["type"].endswith("delta") for event in events)


@pytest.mark.parametrize("name", sorted(OUTPUTS.keys() - {"nothing", "cut call"}))
def test_events_nest(name: str) -> None:
    """What begins ends in reverse order; the deltas of a text stand in a row, before its end."""
    under_way: list[str] = []
    for event in followed([part for piece in OUTPUTS[name] for part in cut(piece, 1)])[0]:
        stem, what = event["type"].rsplit(".", 1)
        if what == "done":
            assert under_way.pop() == f"{stem}.{'added' if stem.endswith(('item', 'part')) else 'delta'}"
        elif under_way[-1:] != [event["type"]]:
            under_way.append(event["type"])
    assert not under_way


# -- log-probabilities


def scored(*tokens: str) -> list[dict[str, Any]]:
    return [{"token": token, "bytes": [*token.encode()], "logprob": -1.0, "top_logprobs": []} for token in tokens]


def test_a_message_has_the_log_probabilities_of_its_tokens() -> None:
    items = response_items()
    events = [
        *items.add([], scored("<think>")),
        *items.add([Reasoning("hm")], scored("hm")),
        *items.add([], scored("</think>", "Y")),
        *items.add([Content("Yes")], scored("es")),
        *items.add([], scored("<call>")),
        *items.add([CallBegin(0, "f"), Arguments(0, "{}")], scored("{}")),
        *items.end("completed"),
    ]
    told = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert told == [scored("Y", "es")]
    assert items.parts[1]["content"][0]["logprobs"] == told[0]
    assert rebuilt(events) == [without_ids(item) for item in items.parts]


def test_log_probabilities_without_a_text_come_last() -> None:
    items = response_items()
    events = [*items.add([Content("a")], scored("a")), *items.add([], scored("b")), *items.end("completed")]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [(event["delta"], event["logprobs"]) for event in deltas] == [("a", scored("a")), ("", scored("b"))]
