"""A target's view of a prefill pool: whether it serves, what it has to do, and what its hand-overs brought.

    greeted ──── Welcome, its memory is open ────► ready ──── silent for SILENCE, gone, or another life ────► greeted
       └──────── TurnedAway, or a Welcome of KV that cannot stand for ours: refused, and greeted on

A pool whose hand-overs fail one after the other is left alone for a while, then tried with one; longer each time that
this fails too. One that drains gets no orders any more.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from pilotfish.core.drafting.messages import Notice, Peer
from pilotfish.core.drafting.pools import Drops
from pilotfish.core.drafting.told_prefixes import ToldPrefixes
from pilotfish.core.prefilling.handover import HandOverReport, HandOverTotals
from pilotfish.core.prefilling.prefill_costs import ExposedSeconds
from pilotfish.core.prefilling.prefill_messages import PREFILL_VERSION, PrefillLoad, Welcome
from pilotfish.core.prefilling.segments import KVIdentity

#: Seconds between two Greetings: sooner while nothing has answered.
GREETING, FIRST_GREETING = 1.0, 0.05
#: Seconds between two Renewals, and how many of them a lease outlives at least.
RENEWAL, RENEWALS = 0.2, 6
#: Seconds without a message after which a pool is lost. It answers every Renewal.
SILENCE = 1.0
#: Seconds that a pool is not asked after it was busy.
BUSY = 0.25
#: Hand-overs that fail one after the other until a pool is left alone, and for how many seconds: twice as many each
#: time that the next one fails too, up to 2 ** MAX_DOUBLINGS times.
MAX_FAILURES, PAUSE, MAX_DOUBLINGS = 3, 1.0, 6
#: Seconds of answers after which a pool that was lost is reported as back.
BACK = 5.0

#: Why what a pool sent was not used.
REFUSED = {
    "forged": "references that it did not sign",
    "tokens": "segments of other tokens than were ordered",
    "unexpected": "messages out of turn",
    "out_of_range": "references to places that it does not have",
    "stale": "references to places that were freed",
    "content": "segments that came damaged",
    "layout": "segments of a layout that cannot be converted",
    "late": "segments that could not be read in time",
    "gone": "segments that it did not have",
    "orders": "orders that it could not carry out",
    "malformed": "frames that are no message",
}


def mismatch(welcome: Welcome, own: KVIdentity) -> str | None:
    """What of a pool's KV keeps it from standing for our own; None: nothing."""
    if welcome.version != PREFILL_VERSION:
        return f"protocol version: {welcome.version}, not {PREFILL_VERSION}"
    if (reason := welcome.identity.difference(own)) is not None:
        return reason
    theirs, ours = welcome.identity.layout.span, own.layout.span
    if not theirs.start <= ours.start <= ours.stop <= theirs.stop:
        return f"layout: heads {theirs.start} to {theirs.stop - 1}, not {ours.start} to {ours.stop - 1}"
    return None


@dataclass
class PrefillPool:
    name: str
    peer: Peer
    scheme: str = "ipc"  # of its address: by what segments are fetched
    ready: bool = False
    draining: bool = False  # it is to leave
    transport: str = ""  # how its segments are read, or were
    fetches: bool = False  # whether they come over the channel
    welcome: Welcome | None = None  # of its present life
    load: PrefillLoad | None = None
    refusal: str | None = None  # why it does not serve this target
    told: ToldPrefixes = field(default_factory=ToldPrefixes)  # prefixes whose KV it may have
    exposed: ExposedSeconds = field(default_factory=ExposedSeconds)
    totals: dict[str, HandOverTotals] = field(default_factory=dict)  # by transport
    notices: list[Notice] = field(default_factory=list)  # for the log
    drops: Drops = field(init=False)
    asked: float = 0.0  # when it last got an order
    retrials: int = 0  # orders, one after the other, that it got only to see how long they take
    _heard: float = 0.0
    _greeted: float = -GREETING
    _renewed: float = -RENEWAL
    _not_before: float = 0.0
    _failures: int = 0  # hand-overs, one after the other
    _reported_refusal: str = ""
    _reported_loss: bool = False
    _ready_since: float = 0.0

    def __post_init__(self) -> None:
        self.drops = Drops(self.name, self.notices, REFUSED, REFUSED)

    @property
    def refused(self) -> dict[str, int]:
        return self.drops.counts

    @property
    def token_seconds(self) -> float | None:
        """That KV of a token takes there; None before it was measured."""
        return self.load.token_ms / 1000 if self.load is not None and self.load.token_ms else None

    def takes(self, tokens: int, now: float) -> bool:
        free = self.ready and not self.draining and now >= self._not_before
        return free and self.welcome is not None and tokens <= self.welcome.context

    # -- its life

    def heard(self, load: PrefillLoad, now: float) -> None:
        self.load = load
        self.knows(now)

    def knows(self, now: float) -> None:
        """It has sent what only a pool can send that knows this target still: one that was started again answers too,
        but with refusals. Bytes of segments count: what answers Renewals may be behind many of them on a slow link."""
        self._heard = now

    def greeting_due(self, now: float) -> bool:
        waited = now - self._greeted
        if self.ready or waited < (GREETING if self.refusal else FIRST_GREETING):
            return False
        self._greeted = now
        return True

    def renewal_due(self, now: float) -> bool:
        lease = RENEWAL if self.welcome is None else self.welcome.lease / RENEWALS
        if not self.ready or now - self._renewed < min(RENEWAL, lease):
            return False
        self._renewed = now
        return True

    def same_life(self, welcome: Welcome) -> bool:
        """Whether the pool is the one that was welcomed before, with the same memory."""
        return self.welcome is not None and (welcome.mac_key, welcome.shared_memory, welcome.remote_memory) == (
            self.welcome.mac_key,
            self.welcome.shared_memory,
            self.welcome.remote_memory,
        )

    def begins_life(self, welcome: Welcome) -> None:
        self.ready, self.welcome, self.load = False, welcome, None
        self.told.clear()
        self.exposed.forgive()

    def serves(self, transport: str, now: float, *, fetches: bool) -> None:
        if transport != self.transport:
            self._note(logging.INFO, f"{self.name}: segments are read by {transport}")
        self.transport, self.fetches, self.refusal = transport, fetches, None
        self.ready, self._heard, self._ready_since = True, now, now

    def refuses(self, reason: str) -> None:
        """It does not serve this target, or must not. Only a pool that has served gives a notice: before that, the
        command that waits for it reports the reason."""
        if self.transport and reason != self._reported_refusal:
            self._note(logging.WARNING, f"{self.name}: {reason}; prompts are computed without it")
            self._reported_refusal = reason
        self.refusal, self.ready, self.welcome = reason, False, None

    def lost(self, reason: str) -> None:
        """The first loss gives a notice, unless it was to leave; then there is one when it is back to stay."""
        self.leaves()
        if not (self._reported_loss or self.draining):
            self._reported_loss = True
            self._note(logging.WARNING, f"{reason}; prompts are computed without it")

    def leaves(self) -> None:
        self.ready, self.welcome, self.load = False, None, None

    def silent(self, now: float) -> bool:
        return self.ready and now - self._heard > SILENCE

    def tick(self, now: float) -> None:
        if self._reported_loss and self.ready and now - self._ready_since >= BACK:
            self._reported_loss = False
            self._note(logging.INFO, f"{self.name} is back")

    # -- its hand-overs

    def busy(self, now: float) -> None:
        self._not_before = max(self._not_before, now + BUSY)

    def failed(self, now: float) -> None:
        """A hand-over failed for a reason that lies with the pool."""
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            seconds = PAUSE * 2.0 ** min(self._failures - MAX_FAILURES, MAX_DOUBLINGS)
            self._not_before = now + seconds
            if self._failures == MAX_FAILURES:
                text = f"{self.name} is left alone: {MAX_FAILURES} hand-overs failed one after the other"
                self._note(logging.WARNING, text)

    def slow(self, report: HandOverReport) -> None:
        self.exposed.lose(report.seconds)

    def ended(self, report: HandOverReport) -> None:
        self.totals.setdefault(report.transport, HandOverTotals()).add(report)

    def succeeded(self, report: HandOverReport) -> None:
        if self._failures >= MAX_FAILURES:
            self._note(logging.INFO, f"{self.name} is used again")
        self._failures = 0
        self.exposed.observe(report.tokens, report.exposed)

    def _note(self, level: int, text: str) -> None:
        self.notices.append(Notice(level, text))
