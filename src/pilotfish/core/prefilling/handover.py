"""KV that a prefill worker computes for a target; to a scheduler like a load from tiers (`tiers.py`).

position   0 ............ first ......................... n │ last
           [ it has        ][ slots, filled by the hand-over ][ its own row, which samples ]
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from pilotfish.core.cache.slots import Slots

WHOLE = "whole"  # how a hand-over ends that has brought all its tokens


@dataclass
class HandOverReport:
    """Times in seconds; unknown ones are 0.

    began ├── queued ──┼────────── computing ──────────┼─ exposed ─┤ began + seconds
          ├───────── arriving ─────────┼─ segments come ───────────┤
    """

    pool: str = ""  # that computes it
    transport: str = ""  # how its segments are read
    outcome: str = ""  # WHOLE, or in a word why it ended earlier
    began: float = 0.0  # a moment of the target's clock
    seconds: float = 0.0  # from its beginning to its end
    queued: float = 0.0  # that it waited at the pool
    computing: float = 0.0  # from its first row there to its last
    arriving: float = 0.0  # from its beginning to its first segment
    transfer: float = 0.0  # of work: reading its segments, checking them, writing them into slots
    hidden: float = 0.0  # of that work, at least, while the pool computed
    size: int = 0  # bytes that came
    tokens: int = 0  # that came
    cached: int = 0  # tokens of the sequence whose KV the pool had already

    @property
    def told(self) -> bool:
        """Whether its parts are known: the pool has told its times, and nothing was lost."""
        return self.outcome == WHOLE and self.computing > 0

    @property
    def exposed(self) -> float:
        """Seconds of transfer and messages on top of waiting and computing."""
        return max(self.seconds - self.queued - self.computing, 0.0) if self.told else 0.0

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "exposed": self.exposed}

    @property
    def lost(self) -> float:
        return 0.0 if self.outcome == WHOLE else self.seconds


@dataclass(eq=False)
class HandOver:
    tokens: Sequence[int]  # the sequence up to the last one whose KV is wanted
    slots: Slots  # [n], of the last n tokens
    salt: str | None = None
    count: int | None = None  # of `slots`, how many first ones have their KV; None: it is on its way
    report: HandOverReport = field(default_factory=HandOverReport)

    @property
    def first(self) -> int:
        return len(self.tokens) - len(self.slots)

    def end(self, count: int, outcome: str, now: float) -> None:
        self.count = self.report.tokens = count
        self.report.outcome = outcome
        self.report.seconds = now - self.report.began


@dataclass
class HandOverTotals:
    outcomes: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    size: int = 0  # bytes
    transfer: float = 0.0  # seconds of work
    hidden: float = 0.0  # of them, that passed while the pool computed, at least

    def add(self, report: HandOverReport) -> None:
        self.outcomes[report.outcome] = self.outcomes.get(report.outcome, 0) + 1
        self.tokens += report.tokens
        self.size += report.size
        self.transfer += report.transfer
        self.hidden += report.hidden


class Prefills(Protocol):
    """Called from the scheduler's thread. Failures elsewhere do not raise: the tokens are then computed here."""

    def computed(self, tokens: int, seconds: float) -> None:
        """A forward here took so long and computed KV of so many prompt tokens; 0: it only decoded."""

    def worth_sending(self, tokens: Sequence[int], first: int, salt: str | None, waiting: int, neighbours: int) -> bool:
        """Whether KV of tokens [first, len(tokens)) comes sooner from elsewhere; `waiting` tokens are computed here
        before it, and `neighbours` requests decode meanwhile."""

    def begin(self, handover: HandOver) -> None:
        """Have it computed and its slots filled, after `worth_sending`."""

    def poll(self) -> None:
        """Hand-overs that have ended, or take too long, get their `count`; their slots are written no more."""

    def cancel(self, handover: HandOver) -> None:
        """It has its `count` when this returns."""

    def wait(self) -> None:
        """Returns when a hand-over may have ended; after a few milliseconds at most."""
