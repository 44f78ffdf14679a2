"""Requests that begin alike, as scripts: a request, its answer, the next request."""

from collections.abc import Callable, Generator, Sequence
from itertools import cycle
from typing import Any

from msgspec import Struct

from pilotfish.cli.bench.workload import Prompt

#: Tokens of a message after the first one, and of the prompt that has several samples.
MESSAGE_TOKENS, SAMPLED_TOKENS = 100, 1000
#: Messages of a conversation after the first; an agent's tasks, and the steps of each; samples; how often a request is
#: sent again.
TURNS, TASKS, STEPS, SAMPLES, RETRIES = 4, 2, 3, 8, 3


class Ask(Struct, frozen=True):
    """A request of a script. It is `timed` where most of it was computed for an earlier one."""

    text: str
    timed: bool
    samples: int = 1


#: Kinds of scripts.
WORKLOADS = CONVERSATION, AGENT, RETRIED, SAMPLED = ("conversation", "agent", "retries", f"n={SAMPLES}")

#: Gives requests and is sent the text of each answer, of a first sample.
Script = Generator[Ask, str, None]


class TextSupply:
    """Texts of any length out of a prompt file, whose rows it takes in turn."""

    def __init__(self, rows: Sequence[Prompt], tokenizer: Any) -> None:
        self._texts = cycle(row.text if isinstance(row.text, str) else tokenizer.decode(row.text) for row in rows)
        self._tokenizer = tokenizer

    def take(self, tokens: int, heading: str = "") -> str:
        """A text of about so many tokens that begins with `heading`."""
        text = heading
        while len(ids := self._tokenizer.encode(text)) < tokens:
            text += next(self._texts) + "\n"
        whole: str = self._tokenizer.decode(ids[:tokens])
        return whole


def scripts_of(supply: TextSupply, shared: int, heading: str) -> dict[str, Script]:
    """One of each kind. They share nothing with each other, nor with those of another heading; what is timed in them
    has `shared` tokens, or a little more, in common with what was asked before."""

    def text(name: str, tokens: int = shared) -> str:
        return supply.take(tokens, f"{heading}, {name}\n")

    def messages(number: int) -> list[str]:
        return [supply.take(MESSAGE_TOKENS) for _ in range(number)]

    return {
        CONVERSATION: conversation(text(CONVERSATION), messages(TURNS)),
        AGENT: agent(text(AGENT), [messages(STEPS) for _ in range(TASKS)]),
        RETRIED: retries(text(RETRIED)),
        SAMPLED: samples(text(SAMPLED, SAMPLED_TOKENS)),
    }


def conversation(first: str, messages: Sequence[str]) -> Script:
    """Each request is all that was said before, and a message."""
    text = first + (yield Ask(first, timed=False))
    for message in messages:
        text += message
        text += yield Ask(text, timed=True)


def agent(system: str, tasks: Sequence[Sequence[str]]) -> Script:
    """Each task begins with the same text; its steps go on with what a tool has answered."""
    for task, results in enumerate(tasks):
        text = system
        for step, result in enumerate(results):
            text += result
            text += yield Ask(text, timed=task + step > 0)


def retries(text: str) -> Script:
    for attempt in range(1 + RETRIES):
        yield Ask(text, timed=attempt > 0)


def samples(text: str) -> Script:
    yield Ask(text, timed=True, samples=SAMPLES)


def play(script: Script, answer: Callable[[Ask], str]) -> None:
    """Asks one request after the other."""
    ask = next(script, None)
    while ask is not None:
        try:
            ask = script.send(answer(ask))
        except StopIteration:
            ask = None
