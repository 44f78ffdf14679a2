"""What an answer of a server says: its text and calls, how it ended, when each of its tokens came."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from pilotfish.cli.bench.serving.client import SHOWN, Answer, Event
from pilotfish.cli.bench.serving.requests import Message

OK = 200


def finish_reason(answer: Answer) -> str | None:
    choices = (choice for event in answer.events for choice in _choices(event.data))
    return next((choice["finish_reason"] for choice in choices if choice.get("finish_reason")), None)


def error_of(answer: Answer) -> str:
    """Empty where the answer is whole. A stream has ended well by `[DONE]`, or else by its output's finish_reason: not
    all servers send the former."""
    data = [event.data for event in answer.events]
    errors = [one["error"] for one in data if one.get("error")]
    told = next((str((isinstance(e, Mapping) and e.get("message")) or e) for e in errors), "")
    if answer.status and answer.status != OK:
        other = next((str(one)[:SHOWN] for one in data), "no reason given")
        return f"HTTP {answer.status}: {told or answer.problem or other}"
    if told or answer.problem or answer.ended or finish_reason(answer) is not None:
        return told or answer.problem
    return "the answer broke off" if answer.status else "no answer came"


def _choices(data: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return data.get("choices") or ()


def _said(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    return choice.get("delta") or choice.get("message") or {"content": choice.get("text")}


def generated_text(event: Event) -> str:
    """What an event adds to the output: text, reasoning included, then names and arguments of calls."""
    text, calls = "", list[Mapping[str, Any]]()
    for said in map(_said, _choices(event.data)):
        text += "".join(said.get(name) or "" for name in ("reasoning_content", "reasoning", "content"))
        calls += said.get("tool_calls") or ()
    functions = [call.get("function") or {} for call in calls]
    return text + "".join(one.get(name) or "" for one in functions for name in ("name", "arguments"))


def reply_of(answer: Answer) -> Message:
    """The answer as a message of the next turn's history; its reasoning is left out."""
    said = [_said(choice) for event in answer.events for choice in _choices(event.data)]
    return {"role": "assistant", "content": "".join(one.get("content") or "" for one in said)}


def usage_of(answer: Answer) -> Mapping[str, Any]:
    """Of the whole answer; empty where the server tells none."""
    return next((event.data["usage"] for event in reversed(answer.events) if event.data.get("usage")), {})


def token_times(answer: Answer, tokens: int) -> list[float]:
    """When each token came, in moments of the host's monotonic clock; those of one event together, as the server's
    running usage says. Without one, an event has a token if there are as many of both, else its share of the text."""
    running = [event for event in answer.events if _choices(event.data) and event.data.get("usage")]
    events = [event for event in answer.events if generated_text(event)]
    if running and all(event.data.get("usage") for event in events):
        counts = [int(event.data["usage"].get("completion_tokens") or 0) for event in running]
        return _spread(running, [min(count, tokens) for count in counts])
    if not events:
        return []
    if len(events) == tokens:
        return [event.at for event in events]
    sizes = list(accumulate(len(generated_text(event)) for event in events))
    return _spread(events, [max(1, round(tokens * size / sizes[-1])) if tokens else 0 for size in sizes])


def _spread(events: Sequence[Event], counts: Sequence[int]) -> list[float]:
    """`counts` are of all tokens up to each event's end."""
    times: list[float] = []
    for event, count in zip(events, counts, strict=True):
        times += [event.at] * (count - len(times))
    return times
