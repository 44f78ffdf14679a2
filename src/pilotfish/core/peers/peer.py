"""Both halves of a connection between a target and its pools, whatever the protocol on it.

    Dialer, in the target                                   Listener, in a worker
      DialedPool ── hello, again and again ──────────────►  GreetedTarget, or a refusal
          ready ◄── load, now and then ───────────────────┤
          silent, lost, back; refusals; what was dropped    those that are silent are forgotten

The machines have no socket, clock or lock: their owners send the `outbox` and log the notices.
"""

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, NamedTuple, TypeVar

from msgspec import Struct

from pilotfish.core.cache.prefix_keys import ToldPrefixes
from pilotfish.core.peers.fields import MAX_TEXT, Echo, Error, Notice, Outgoing, Peer

#: Seconds between two greetings: sooner while nothing has answered.
GREETING, FIRST_GREETING = 1.0, 0.05
#: Seconds without a message after which a pool is silent. It answers, or sends its load, five times a second.
SILENCE = 1.0
BACK = 5.0  # seconds of answers after which a pool that was silent or lost is reported as back
#: Seconds until a reason that was logged is logged again: twice as many each time.
FIRST_PAUSE, LAST_PAUSE = 60.0, 3600.0
MAX_TARGETS = 256  # targets of one tenant, and of all without keys
KEPT = 16  # round trips that are remembered
PERIOD = 1.0  # seconds between two Errors of a code
#: Rules of which a side may be told that it broke them.
CODES = {
    "malformed": "the frame is no message",
    "unknown_type": "the message is of a type that is not known here: it was ignored",
    "ids": "ids of nodes rise within a Tree, and from Tree to Tree of a generation",
    "base_len": "a Tree's base_len is not above the target's tokens, nor below that of the Tree before it",
    "vocabulary": "tokens of nodes are below vocab_size",
    "room": "a session has no more nodes than the target holds, about twice `wanted`",
    "gap": "Trees of a generation are numbered from 0 on, without gaps",
    "version": "a version is chosen from the range that Hello tells of",
}


class EchoClock:
    """Measures the delay of messages, at either side.

            target    sent ─────────────┐             ┌──► now
            draft                       └─► held ─────┘ sent, heard, held      round trip = now - heard - held

    Each side uses its own clock. A wait on arrival counts as delay, so the least of the last round trips is taken (RFC
    5905, clock filter), and half of it for one way.
    """

    def __init__(self) -> None:
        self._heard: int | None = None
        self._heard_at = 0.0
        self._round_trips = deque[float](maxlen=KEPT)

    def stamp(self, now: float) -> Echo:
        held = 0 if self._heard is None else max(round((now - self._heard_at) * 1e6), 0)
        return Echo(_microseconds(now), self._heard, held)

    def hear(self, echo: Echo | None, now: float) -> None:
        if echo is None:
            return
        self._heard, self._heard_at = echo.sent, now
        if echo.heard is not None and (passed := _microseconds(now) - echo.heard - echo.held) >= 0:
            self._round_trips.append(passed / 1e6)

    @property
    def delay(self) -> float | None:
        """Seconds one way; None until a message came back."""
        return min(self._round_trips) / 2 if self._round_trips else None


def _microseconds(now: float) -> int:
    return max(round(now * 1e6), 0) % (1 << 53)


@dataclass
class _Told:
    at: float
    pause: float
    untold: int = 0


class Untold(NamedTuple):
    times: int  # since the last report
    seconds: float


class Seldom:
    """Decides when to report a repeated event: at once, then in sum, after pauses that double up to `last` seconds."""

    def __init__(self, first: float, last: float) -> None:
        self._first, self._last = first, last
        self._told: dict[str, _Told] = {}

    def add(self, key: str, count: int, now: float) -> Untold | None:
        """None: report later."""
        told = self._told.get(key)
        if told is not None and now - told.at < told.pause:
            told.untold += count
            return None
        before = _Told(now, self._first / 2) if told is None else told
        self._told[key] = _Told(now, min(2 * before.pause, self._last))
        return Untold(before.untold + count, now - before.at)


class ErrorReports:
    def __init__(self) -> None:
        self._seldom = Seldom(PERIOD, PERIOD)

    def of(self, code: str, about: str, reason: str, now: float, session: int = 0, generation: int = 0) -> Error | None:
        """The Error to send now for a frame that broke rule `code` of CODES; None: later, in sum."""
        told = self._seldom.add(code, 1, now)
        return told and Error(code, about[:MAX_TEXT], reason[:MAX_TEXT], told.times, session, generation)


class Drops:
    def __init__(self, pool: str, notices: list[Notice], reasons: Mapping[str, str], faults: Collection[str]) -> None:
        """`reasons` with their meanings; those in `faults` are warnings."""
        self.counts = dict.fromkeys(reasons, 0)
        self._reasons, self._faults = reasons, faults
        self._pool, self._notices = pool, notices
        self._seldom = Seldom(FIRST_PAUSE, LAST_PAUSE)

    @property
    def occurred(self) -> dict[str, int]:
        return {reason: count for reason, count in self.counts.items() if count}

    def add(self, reason: str, count: int, now: float, detail: str = "") -> None:
        if not count:
            return
        self.counts[reason] += count
        if (told := self._seldom.add(reason, count, now)) is not None:
            since = f" in {told.seconds:.0f} s" if told.seconds else ""
            text = f"{self._pool}: {self._reasons[reason]}: {told.times}{since}{f' ({detail})' if detail else ''}"
            self._notices.append(Notice(logging.WARNING if reason in self._faults else logging.INFO, text))


@dataclass
class DialedPool:
    """`ready` while it answers; a lost one is still greeted. Its first loss gives a notice, unless it was to leave;
    further ones are counted until it is back to stay."""

    REASONS: ClassVar[Mapping[str, str]]  # why something that it sent is dropped, and the meaning of each
    FAULTS: ClassVar[Collection[str]]  # those that no pool has reason to cause
    WITHOUT: ClassVar[str]  # how the target gets on

    name: str
    peer: Peer
    ready: bool = False
    draining: bool = False  # it is to leave
    refusal: str | None = None  # why it does not serve this target
    role: str = "draft"  # or shadow, or prefill, in notices
    told: ToldPrefixes = field(default_factory=ToldPrefixes)  # since it last began to answer
    notices: list[Notice] = field(default_factory=list)  # for the log
    drops: Drops = field(init=False)
    _last_heard: float = 0.0
    _last_greeted: float = -GREETING
    _ready_since: float = 0.0
    _left_alone_until: float = 0.0
    _unreported_losses: int = 0  # since it was last reported as back
    _reported_refusal: str = ""  # since it last served
    _refusal_reported: float = -FIRST_PAUSE  # when

    def __post_init__(self) -> None:
        self.drops = Drops(self.name, self.notices, self.REASONS, self.FAULTS)

    @property
    def answered(self) -> bool:
        return self.ready or self.refusal is not None

    def hello_due(self, now: float) -> bool:
        if now - self._last_greeted < (GREETING if self.answered else FIRST_GREETING):
            return False
        self._last_greeted = now
        return True

    def quiet(self, now: float) -> float:
        return now - self._last_heard

    def fell_silent(self, now: float) -> str:
        silent = self.ready and self.quiet(now) > SILENCE
        return f"{self.name} has been silent for {SILENCE:.1f} s" if silent else ""

    def tick(self, now: float) -> None:
        if not self.ready or now - self._ready_since < BACK:
            return
        if self._unreported_losses:
            times = "once" if self._unreported_losses == 1 else f"{self._unreported_losses} times"
            self.warn(f"{self.name} is back; it was silent or gone {times}")
            self._unreported_losses = 0
        if self._reported_refusal:
            self.warn(f"{self.name} serves this target now; it refused before")
            self._reported_refusal = ""

    def lose(self, reason: str) -> None:
        self.ready = False
        self._unreported_losses += not self.draining
        if self._unreported_losses == 1 and not self.draining:
            self.warn(f"{reason}; {self.WITHOUT}")

    def report_refusal(self, reason: str, now: float) -> None:
        """Leaves it alone for a moment. The first reason gives a notice, others rarely: a pool may give any number."""
        if reason != self._reported_refusal and now - self._refusal_reported >= FIRST_PAUSE:
            self.warn(f"{self.role}_pool: {self.name} refused: {reason}; the target serves without it")
            self._reported_refusal, self._refusal_reported = reason, now
        self._left_alone_until = max(self._left_alone_until, now + GREETING)

    def warn(self, text: str) -> None:
        self.notices.append(Notice(logging.WARNING, text))


P = TypeVar("P", bound=DialedPool)


class Dialer(ABC, Generic[P]):
    """A target's machine: its pools, and messages for them. Methods take the present time."""

    def __init__(self, pools: Sequence[P]) -> None:
        self.pools = tuple(pools)  # a new tuple at each change: other threads read it
        self.outbox: list[Outgoing] = []

    def join(self, pool: P) -> None:
        self.pools = (*self.pools, pool)

    def drain(self, pool: P, draining: bool) -> None:
        pool.draining = draining

    @abstractmethod
    def leave(self, pool: P) -> None: ...

    @abstractmethod
    def lost(self, pool: P, reason: str) -> None:
        """It is not connected: nobody waits for it to be silent."""

    @abstractmethod
    def tick(self, now: float) -> None: ...

    def pool_at(self, peer: Peer) -> P | None:
        return next((pool for pool in self.pools if pool.peer == peer), None)

    def _remove(self, pool: P) -> None:
        self.pools = tuple(other for other in self.pools if other is not pool)

    def _send(self, pool: P, message: Struct) -> None:
        self.outbox.append(Outgoing(pool.peer, message))


@dataclass(eq=False)
class GreetedTarget:
    tenant: str  # of its key
    heard: float
    malformed: int = field(default=0, kw_only=True)  # frames


T = TypeVar("T", bound=GreetedTarget)


class Listener(Generic[T]):
    """A worker's machine: the targets that greeted it, and messages for them. Methods take the present time."""

    def __init__(self) -> None:
        self.outbox: list[Outgoing] = []
        self.notices: list[Notice] = []
        self._targets: dict[Peer, T] = {}

    def _send(self, peer: Peer, message: Struct) -> None:
        self.outbox.append(Outgoing(peer, message))

    def _note(self, level: int, text: str) -> None:
        self.notices.append(Notice(level, text))

    def _too_many(self, tenant: str) -> str | None:
        count = sum(target.tenant == tenant for target in self._targets.values())
        return f"there are {count} targets of {tenant or 'everyone'} already" if count >= MAX_TARGETS else None

    def _count_malformed(self, peer: Peer, reason: str) -> T | None:
        """A target's first malformed frame gives a notice. The target, if known."""
        target = self._targets.get(peer)
        if target is not None:
            target.malformed += 1
            if target.malformed == 1:
                self._note(logging.WARNING, f"dropped a frame of {peer.hex()}: {reason}")
        return target
