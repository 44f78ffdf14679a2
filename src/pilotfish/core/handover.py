"""KV that a prefill worker computes for a target, as a scheduler sees it: like a load from tiers (`core/tiers.py`).

position   0 ............ first ......................... n │ last
           [ it has        ][ slots, filled by the hand-over ][ its own row, which samples ]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pilotfish.core.slots import Slots


@dataclass(eq=False)
class HandOver:
    """KV on its way from a prefill worker into slots that a request owns. Two of them are never equal."""

    tokens: Sequence[int]  # the sequence up to the last one whose KV is wanted
    slots: Slots  # [n], of the last n tokens
    salt: str | None = None
    count: int | None = None  # of `slots`, how many first ones have their KV; None: it is on its way
    pool: str = ""  # that computes it
    queued: float = 0.0  # seconds that it waited there
    computing: float = 0.0  # seconds from its first row there to its last
    seconds: float = 0.0  # from its beginning to its end
    size: int = 0  # bytes that came
    cached: int = 0  # tokens of the sequence whose KV the pool had already

    @property
    def first(self) -> int:
        """The first token that is handed over."""
        return len(self.tokens) - len(self.slots)

    @property
    def exposed(self) -> float:
        """Seconds that the transfer, and the messages, took on top of waiting and computing."""
        return max(self.seconds - self.queued - self.computing, 0.0)

    def count_by_tier(self) -> Mapping[str, int]:
        """Nothing that it brings was there before."""
        return {}


class Prefills(Protocol):
    """Prefill workers elsewhere, as a scheduler has them. All calls come from its thread. None raises for what fails
    elsewhere: the tokens are computed here then."""

    def computed(self, tokens: int, seconds: float) -> None:
        """How long a forward here took that computed KV of so many tokens, most of them of prompts."""

    def worth_sending(self, tokens: Sequence[int], first: int, salt: str | None, waiting: int) -> bool:
        """Whether KV of tokens [first, len(tokens)) is there sooner when it is computed elsewhere; `waiting` tokens are
        to be computed here before."""

    def begin(self, handover: HandOver) -> None:
        """Have it computed, and its slots filled."""

    def poll(self) -> None:
        """Hand-overs that have ended, or take too long, get their `count`; nobody writes to their slots any more."""

    def cancel(self, handover: HandOver) -> None:
        """It has its `count` when this returns."""

    def wait(self) -> None:
        """Until a hand-over may have ended; a few milliseconds at most."""
