"""The target's half of hand-overs: which pool computes what, the check of what comes, and how long to wait.

    begin ── PrefillOrder ──► SegmentReady, OrderDone
                                 │ Fetch ──► SegmentBytes, where the worker's memory cannot be read
                                 │ whatever is not as it should be: refuse
                                 ▼
                              work: read the segment, check it, write it into slots ── landed ──► Taken
                                 │ all is there, or it failed, or it takes too long
                                 ▼
                              settle: the first tokens that are in the slots in every layer ── Release

A hand-over ends once, in `settle` or `cancel`. The machine has no socket, clock or lock: `engine/prefills/` owns
those and does `work`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pilotfish.core.peers.fields import salt_digest
from pilotfish.core.peers.peer import Dialer
from pilotfish.core.prefilling import prefill_messages as messages
from pilotfish.core.prefilling.handover import WHOLE, HandOver
from pilotfish.core.prefilling.incoming import Incoming, Landing
from pilotfish.core.prefilling.prefill_pools import PrefillChoice, PrefillOption, PrefillPool, PromptLoad, mismatch
from pilotfish.core.prefilling.segments import SegmentReference

#: Least seconds of patience with a hand-over, its factor on the expected seconds (or those of computing here), and
#: seconds if neither is known.
LEAST, PATIENCE, UNKNOWN = 1.0, 3.0, 30.0
#: Seconds without news of a hand-over: at least, as a factor on the pool's queue, and at most once something came.
STALL, STALLS, LONGEST_STALL = 0.25, 2.0, 5.0
LAST_WORD = 0.02  # seconds that OrderDone may come late once all is there: it is only for reports

#: Why a hand-over ended before it brought all its tokens.
BUSY, FAILED, GONE, LATE, STALLED, REFUSED, CANCELLED = (
    *("busy", "failed", "gone"),  # the pool had too much to do; could not do it; is gone, or the segment is
    *("late", "stalled"),  # it took too long; nothing came of it for too long
    *("refused", "cancelled"),  # something came that was not used; nobody wants it any more
)
OUTCOMES = (WHOLE, BUSY, FAILED, GONE, LATE, STALLED, REFUSED, CANCELLED)
#: Those that speak against the pool. One that is gone shows that itself.
_FAULTS = (FAILED, LATE, STALLED, REFUSED)


@dataclass(frozen=True)
class PoolMemory:
    """Open the memory of a pool's segments, then call `opened`. Without a `welcome` unmap what was open: while mapped
    it takes room on its host, even if its owner is gone."""

    pool: PrefillPool
    welcome: messages.Welcome | None = None


@dataclass(frozen=True)
class ReadSegment:
    """Read a segment, unless it came as `data`, check it, write it into the slots; then call `landed` or `refuse`."""

    incoming: Incoming
    reference: SegmentReference
    data: memoryview | None = None


class HandOverMachine(Dialer[PrefillPool]):
    def __init__(
        self,
        greeting: messages.PrefillHello | None,
        pools: Sequence[PrefillPool],
        least: int | None = None,
        salt_key: bytes = b"",
    ) -> None:
        """`greeting` may be set until the first pool joins. `least`: tokens from which on prompts are sent, or None."""
        super().__init__(pools)
        self.work: list[PoolMemory | ReadSegment] = []
        self.settled = False  # whether a hand-over may have ended since `settle`
        self.choice = PrefillChoice(least, self._ordered)
        self.greeting, self._salt_key = greeting, salt_key
        self._incoming: dict[int, Incoming] = {}  # by number
        self._next = 1

    def at(self, pool: PrefillPool) -> list[Incoming]:
        return [incoming for incoming in self._incoming.values() if incoming.pool is pool]

    def _ordered(self, pool: PrefillPool) -> int:
        return sum(incoming.outstanding for incoming in self.at(pool))

    # -- the scheduler

    def option(
        self, tokens: Sequence[int], first: int, salt: str | None, waiting: int, neighbours: int, now: float
    ) -> PrefillOption | None:
        """Where to compute KV of tokens [first, len(tokens)); None: here."""
        digest = salt_digest(salt, self._salt_key)
        return self.choice.option(PromptLoad(tokens, first, digest, waiting, neighbours), self.pools, now)

    def begin(self, handover: HandOver, option: PrefillOption, now: float) -> Incoming | None:
        """None if the pool has just been lost or has left; the hand-over has then ended."""
        pool, report = option.pool, handover.report
        report.pool, report.transport, report.began, pool.asked = pool.name, pool.transport, now, now
        if not pool.ready or pool.welcome is None:
            handover.end(0, GONE, now)
            pool.ended(report)
            return None
        patience = LEAST + PATIENCE * max(option.here or 0.0, option.there or 0.0)
        if option.here is None and option.there is None:
            patience = UNKNOWN
        expected = LONGEST_STALL if option.there is None else option.there
        incoming = Incoming(self._next, handover, pool, now, now + patience, expected, option.cached)
        self._incoming[self._next] = incoming
        self._next += 1
        salt = salt_digest(handover.salt, self._salt_key)
        self._send(pool, messages.PrefillOrder(incoming.number, list(handover.tokens), handover.first, salt))
        return incoming

    def settle(self, now: float) -> list[Incoming]:
        """The hand-overs that have ended. Later frames for them do not count."""
        self.settled = False
        ended = []
        for incoming in list(self._incoming.values()):
            if outcome := self._outcome(incoming, now):
                self._end(incoming, outcome, now)
                ended.append(incoming)
        return ended

    def cancel(self, handover: HandOver, now: float) -> Incoming:
        incoming = next(one for one in self._incoming.values() if one.handover is handover)
        self._end(incoming, CANCELLED, now)
        return incoming

    def _outcome(self, incoming: Incoming, now: float) -> str:
        if incoming.complete:
            told = incoming.done is not None or now - incoming.complete_at > LAST_WORD or incoming.outcome
            return WHOLE if told else ""
        if incoming.outcome:
            return incoming.outcome
        if now > incoming.deadline:
            return LATE
        silence = now - incoming.moved
        return STALLED if silence > STALL and silence > self._stall(incoming) else ""

    def _stall(self, incoming: Incoming) -> float:
        if not incoming.segments:
            return STALL + STALLS * incoming.expected
        pool = incoming.pool
        if pool.token_seconds is None or pool.load is None:
            return LONGEST_STALL
        queue = pool.token_seconds * max(pool.load.queued_tokens, self._ordered(pool))
        return STALL + min(STALLS * queue, LONGEST_STALL)

    def _end(self, incoming: Incoming, outcome: str, now: float) -> None:
        del self._incoming[incoming.number]
        incoming.ended, pool, handover = True, incoming.pool, incoming.handover
        handover.end(incoming.count, outcome, incoming.complete_at if outcome == WHOLE else now)
        handover.report.hidden = incoming.hidden
        pool.ended(handover.report)
        if outcome == WHOLE:
            pool.succeeded(handover.report)
        elif outcome in _FAULTS:
            pool.failed(now)
        if outcome in (LATE, STALLED):
            pool.exposed.lose(handover.report.seconds)
        self._send(pool, messages.Release(incoming.number))

    # -- whoever does the work

    def opened(self, work: PoolMemory, transport: str, now: float, *, fetches: bool) -> None:
        if work.pool.welcome is work.welcome:  # or it has begun another life meanwhile
            work.pool.serves(transport, now, fetches=fetches)

    def landed(self, work: ReadSegment, seconds: float, now: float) -> None:
        incoming, report = work.incoming, work.incoming.handover.report
        if incoming.ended:
            return
        del incoming.awaited[work.reference.number]
        incoming.moved = now
        incoming.landings.append(Landing(now, seconds))
        report.transfer += seconds
        report.size += work.reference.size
        self._send(incoming.pool, messages.Taken(incoming.number, [work.reference.number]))
        if incoming.complete:
            incoming.complete_at = now
            self.settled = True

    def refuse(self, incoming: Incoming, reason: str, now: float, detail: str = "") -> None:
        if incoming.ended:  # its places are the pool's to free, also while one is read
            return
        incoming.pool.drops.add(reason, 1, now, detail)
        self._stop(incoming, REFUSED)

    def _stop(self, incoming: Incoming, outcome: str) -> None:
        incoming.outcome = incoming.outcome or outcome
        self.settled = True

    # -- the pools

    @property
    def _introduction(self) -> messages.PrefillHello:
        assert self.greeting is not None  # or no pool had joined
        return self.greeting

    def leave(self, pool: PrefillPool) -> None:
        self._remove(pool)
        for incoming in self.at(pool):
            self._send(pool, messages.Release(incoming.number))
        pool.leaves()
        self._end_life(pool)

    def tick(self, now: float) -> None:
        for pool in self.pools:
            pool.tick(now)
            if reason := pool.fell_silent(now):
                self.lost(pool, reason)
            if not pool.ready and pool.hello_due(now):
                self._send(pool, self._introduction)
            elif pool.renewal_due(now):
                self._send(pool, messages.Renewal([incoming.number for incoming in self.at(pool)]))

    def lost(self, pool: PrefillPool, reason: str) -> None:
        if pool.welcome is not None:
            pool.lose(reason)
            pool.leaves()
            self._end_life(pool)

    def _end_life(self, pool: PrefillPool) -> None:
        for incoming in self.at(pool):
            self._stop(incoming, GONE)
        self.work.append(PoolMemory(pool))

    def malformed(self, pool: PrefillPool, reason: str, now: float) -> None:
        pool.drops.add("malformed", 1, now, reason)
        for incoming in self.at(pool):
            self._stop(incoming, REFUSED)

    def receive(self, pool: PrefillPool, message: messages.FromPrefill, now: float) -> None:
        match message:
            case messages.Welcome():
                self._welcomed(pool, message, now)
            case messages.PrefillRefuse():
                self._end_life(pool)
                pool.refuses(message.reason, now)
            case messages.PrefillLoad():
                pool.heard(message, now)
            case _:
                number = message.reference.handover if isinstance(message, messages.SegmentReady) else message.handover
                incoming = self._incoming.get(number)
                if incoming is not None and incoming.pool is pool and not incoming.outcome:
                    self._heard_of(incoming, message, now)

    def _welcomed(self, pool: PrefillPool, welcome: messages.Welcome, now: float) -> None:
        if pool.same_life(welcome):
            return
        self._end_life(pool)
        if (reason := mismatch(welcome, self._introduction.identity)) is not None:
            pool.refuses(reason, now)
            return
        pool.begins_life(welcome)
        self.work.append(PoolMemory(pool, welcome))

    def _announced(self, incoming: Incoming, reference: SegmentReference, now: float) -> None:
        pool = incoming.pool
        assert pool.welcome is not None  # or nothing were under way there
        if not reference.authentic(pool.welcome.mac_key):
            self.refuse(incoming, "forged", now)
        elif (reason := incoming.announce(reference)) is not None:
            self.refuse(incoming, reason, now, f"segment {reference.number}")
        else:
            pool.knows(now)
            incoming.moved, report = now, incoming.handover.report
            report.arriving = report.arriving or now - incoming.began
            if pool.fetches:
                self._send(pool, messages.Fetch(reference))
            else:
                self.work.append(ReadSegment(incoming, reference))

    def _heard_of(self, incoming: Incoming, message: messages.FromPrefill, now: float) -> None:
        match message:
            case messages.SegmentReady():
                self._announced(incoming, message.reference, now)
            case messages.SegmentBytes():
                self._received(incoming, message, now)
            case messages.SegmentGone():
                self.refuse(incoming, "gone", now, message.reason)
            case messages.OrderDone():
                self._done(incoming, message, now)
            case messages.OrderFailed(busy=True):
                incoming.pool.busy(now)
                self._stop(incoming, BUSY)
            case messages.OrderFailed():
                incoming.pool.drops.add("orders", 1, now, message.reason)
                self._stop(incoming, FAILED)

    def _received(self, incoming: Incoming, message: messages.SegmentBytes, now: float) -> None:
        reference = incoming.awaited.get(message.number)
        if reference is None or message.number in incoming.received or not incoming.pool.fetches:
            self.refuse(incoming, "unexpected", now, f"bytes of segment {message.number}")
            return
        incoming.received.add(message.number)
        incoming.pool.knows(now)
        incoming.moved = now
        self.work.append(ReadSegment(incoming, reference, message.data))

    def _done(self, incoming: Incoming, message: messages.OrderDone, now: float) -> None:
        if incoming.done is not None or message.segments != incoming.segments or not incoming.announced_all:
            self.refuse(incoming, "unexpected", now, f"an end after {incoming.segments} of {message.segments} segments")
            return
        incoming.done, incoming.moved = message, now
        handover, report = incoming.handover, incoming.handover.report
        report.queued, report.computing, report.cached = message.queued, message.computing, message.cached
        told, salt = incoming.pool.told, salt_digest(handover.salt, self._salt_key)
        if message.cached < incoming.cached:
            told.forget(salt, handover.tokens, message.cached)
        told.tell(salt, handover.tokens)
        self.settled = self.settled or incoming.complete
