"""A target's view of a prefill pool: its state, its load, and the results of its hand-overs.

    greeted ──── Welcome, its memory is open ────► ready ──── silent for SILENCE, gone, or another life ────► greeted
       └──────── PrefillRefuse, or a Welcome of KV that cannot stand for ours: refused, and greeted on

A pool whose hand-overs fail in a row rests, then is tried with one; longer each time that this fails too. One that
drains gets no orders.
"""

import logging
from dataclasses import dataclass, field

import numpy as np

from pilotfish.core.peers.fields import Notice
from pilotfish.core.peers.peer import DialedPool
from pilotfish.core.prefilling.handover import HandOverReport, HandOverTotals
from pilotfish.core.prefilling.prefill_messages import PREFILL_VERSION, PrefillLoad, Welcome
from pilotfish.core.prefilling.segments import KVIdentity
from pilotfish.core.trees.tree import Floats

#: Seconds between two Renewals, and how many of them a lease outlives at least.
RENEWAL, RENEWALS = 0.2, 6
#: Seconds that a pool is not asked after it was busy.
BUSY = 0.25
#: Hand-overs that fail in a row before a pool rests, and its seconds of rest: doubled each time that the next one fails
#: too, up to 2 ** MAX_DOUBLINGS times.
MAX_FAILURES, PAUSE, MAX_DOUBLINGS = 3, 1.0, 6

#: Reasons not to use a pool's messages or segments.
REFUSED = {
    "forged": "references that it did not sign",
    "tokens": "segments of other tokens than were ordered",
    "unexpected": "messages out of turn",
    "out_of_range": "references to places that it does not have",
    "stale": "references to places that were freed",
    "content": "segments that came damaged",
    "layout": "segments of another layout than it told of",
    "late": "segments that could not be read in time",
    "gone": "segments that it did not have",
    "orders": "orders that it could not carry out",
    "malformed": "frames that are no message",
}


def mismatch(welcome: Welcome, own: KVIdentity) -> str | None:
    if welcome.version != PREFILL_VERSION:
        return f"protocol version: {welcome.version}, not {PREFILL_VERSION}"
    if (reason := welcome.identity.difference(own)) is not None:
        return reason
    theirs, ours = welcome.identity.layout.span, own.layout.span
    if theirs != ours:
        return f"layout: heads {theirs.start} to {theirs.stop - 1}, not {ours.start} to {ours.stop - 1}"
    return None


class ExposedSeconds:
    """By tokens: means for powers of two, straight lines between, at least the time lost with the last one given up."""

    RATE = 0.3

    def __init__(self) -> None:
        self._means: dict[int, Floats] = {}  # by the power: mean tokens, mean seconds
        self._lost = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        seen = np.array([tokens, seconds])
        mean = self._means.get(tokens.bit_length(), seen)
        self._means[tokens.bit_length()] = mean + self.RATE * (seen - mean)
        self.forgive()

    def forgive(self) -> None:
        self._lost = 0.0

    def lose(self, seconds: float) -> None:
        self._lost = max(self._lost, seconds)

    def at(self, tokens: int) -> float:
        if not self._means:
            return self._lost
        known, seconds = np.array([self._means[power] for power in sorted(self._means)]).T
        return max(float(np.interp(tokens, known, seconds) * max(tokens / known[-1], 1.0)), self._lost)


@dataclass
class PrefillPool(DialedPool):
    REASONS, FAULTS = REFUSED, REFUSED
    WITHOUT = "prompts are computed without it"

    role: str = "prefill"
    scheme: str = "ipc"  # of its address: the way by which segments are fetched
    transport: str = ""  # how its segments are read, or were
    fetches: bool = False  # whether they come over the channel
    welcome: Welcome | None = None  # of its present life
    load: PrefillLoad | None = None
    exposed: ExposedSeconds = field(default_factory=ExposedSeconds)
    totals: dict[str, HandOverTotals] = field(default_factory=dict)  # by transport
    asked: float = 0.0  # when it last got an order
    retrials: int = 0  # orders, one after the other, that it got only to see how long they take
    _renewed: float = -RENEWAL
    _failures: int = 0  # hand-overs, one after the other

    @property
    def token_seconds(self) -> float | None:
        return self.load.token_ms / 1000 if self.load is not None and self.load.token_ms else None

    def takes(self, tokens: int, now: float) -> bool:
        free = self.ready and not self.draining and now >= self._left_alone_until
        return free and self.welcome is not None and tokens <= self.welcome.context

    # -- its life

    def heard(self, load: PrefillLoad, now: float) -> None:
        self.load = load
        self.knows(now)

    def knows(self, now: float) -> None:
        """Only a pool that knows this target can have sent it. Segments count: other answers may queue behind them."""
        self._last_heard = now

    def renewal_due(self, now: float) -> bool:
        lease = RENEWAL if self.welcome is None else self.welcome.lease / RENEWALS
        if not self.ready or now - self._renewed < min(RENEWAL, lease):
            return False
        self._renewed = now
        return True

    def same_life(self, welcome: Welcome) -> bool:
        names = ("mac_key", "shared_memory", "remote_memory")
        return self.welcome is not None and all(getattr(welcome, n) == getattr(self.welcome, n) for n in names)

    def begins_life(self, welcome: Welcome) -> None:
        self.ready, self.welcome, self.load = False, welcome, None
        self.told.clear()
        self.exposed.forgive()

    def serves(self, transport: str, now: float, *, fetches: bool) -> None:
        if transport != self.transport:
            self.notices.append(Notice(logging.INFO, f"{self.name}: segments are read by {transport}"))
        self.transport, self.fetches, self.refusal = transport, fetches, None
        self.ready, self._last_heard, self._ready_since = True, now, now

    def refuses(self, reason: str, now: float) -> None:
        """Only a pool that has served gives a notice: the command that waits for it reports an earlier refusal."""
        if self.transport:
            self.report_refusal(reason, now)
        self.leaves()
        self.refusal = reason

    def leaves(self) -> None:
        self.ready, self.welcome, self.load = False, None, None

    # -- its hand-overs

    def busy(self, now: float) -> None:
        self._left_alone_until = max(self._left_alone_until, now + BUSY)

    def failed(self, now: float) -> None:
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            seconds = PAUSE * 2.0 ** min(self._failures - MAX_FAILURES, MAX_DOUBLINGS)
            self._left_alone_until = now + seconds
            if self._failures == MAX_FAILURES:
                self.warn(f"{self.name} is left alone: {MAX_FAILURES} hand-overs failed one after the other")

    def ended(self, report: HandOverReport) -> None:
        self.totals.setdefault(report.transport, HandOverTotals()).add(report)

    def succeeded(self, report: HandOverReport) -> None:
        if self._failures >= MAX_FAILURES:
            self.notices.append(Notice(logging.INFO, f"{self.name} is used again"))
        self._failures = 0
        self.exposed.observe(report.tokens, report.exposed)
