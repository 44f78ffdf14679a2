"""What clients of a fleet say, in tokens cut out of one text: talks that grow by an answer and a message each turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from pilotfish.bench.offered_loads import TokenRing

#: Tokens of a message, and of a prompt that shares nothing; messages of a conversation, steps of an agent's task.
MESSAGE, ALONE, MESSAGES, STEPS = 50, 200, 5, 4
#: System prompts of agents; the i-th has 1/i as many tasks as the first.
SYSTEMS = 8


@dataclass(frozen=True)
class Talk:
    """Each request is all that was said before, and a message."""

    name: str
    begin: list[int]
    messages: list[list[int]]


#: Kinds of talks.
CONVERSATIONS, AGENTS, HOT, EVEN = ("conversations", "agents", "one hot prefix", "nothing shared")


def talks(kind: str, ring: TokenRing, shared: int, seed: int) -> Iterator[Talk]:
    """Without end. Those of conversations share nothing with each other; agents' tasks begin with one of a few texts,
    and all with the same where it is hot."""
    make = _makers(ring, shared, np.random.default_rng(seed))[kind]
    for number in count():
        begin, messages = make()
        yield Talk(f"{kind} {number}", begin, [ring.cut(ALONE if kind == EVEN else MESSAGE) for _ in range(messages)])


def _makers(ring: TokenRing, shared: int, draw: np.random.Generator) -> dict[str, Callable[[], tuple[list[int], int]]]:
    systems = [ring.cut(shared) for _ in range(SYSTEMS)]
    often = 1 / np.arange(1, SYSTEMS + 1)

    def system() -> list[int]:
        return systems[int(draw.choice(SYSTEMS, p=often / often.sum()))]

    return {
        CONVERSATIONS: lambda: (ring.cut(shared), MESSAGES),
        AGENTS: lambda: (system(), STEPS),
        HOT: lambda: (systems[0], 1),
        EVEN: lambda: ([], 1),
    }
