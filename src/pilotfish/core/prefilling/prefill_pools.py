"""A target's view of a prefill pool: its state, its load, and the results of its hand-overs.

    greeted ──── Welcome, its memory is open ────► ready ──── silent for SILENCE, gone, or another life ────► greeted
       └──────── PrefillRefuse, or a Welcome of KV that cannot stand for ours: refused, and greeted on

A pool whose hand-overs fail in a row rests, then is tried with one; longer each time that this fails too. One that
drains gets no orders.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pilotfish.core.peers.fields import Notice
from pilotfish.core.peers.peer import DialedPool
from pilotfish.core.prefilling.handover import HandOverReport, HandOverTotals
from pilotfish.core.prefilling.prefill_messages import PREFILL_VERSION, PrefillLoad, Welcome
from pilotfish.core.prefilling.segments import KVIdentity
from pilotfish.core.scheduling.calibration import RecentMean, RecentRate
from pilotfish.core.trees.tree import Floats

#: Seconds between two Renewals, and how many of them a lease outlives at least.
RENEWAL, RENEWALS = 0.2, 6
BUSY = 0.25  # seconds that a pool is not asked after it was busy
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


#: Times as long as here that a prompt may take elsewhere if it would delay others' decoding here: without the pool's
#: queue, which soon changes, and with it.
BESIDE, BESIDE_QUEUED = 1.1, 2.0
#: Shares of a step here: the rest of it, on average, when a hand-over ends; the waste in its last chunk's step.
LEFT = 0.5
#: Tokens of a prompt that is never worth a hand-over: they fit into a forward beside decoding rows.
FEW = 128
TRIAL = 256  # tokens of a prompt that is sent to measure a hand-over
#: Seconds after which a pool that was not worth it is tried again: twice as many each time, so many times at most.
RETRIAL, MAX_RETRIALS = 10.0, 6


@dataclass(frozen=True)
class PrefillOption:
    """A pool that could compute KV. Seconds are None until measured."""

    pool: PrefillPool
    cached: int  # tokens whose KV it is believed to have
    there: float | None  # until they are here, and the last token's row is computed
    here: float | None  # that computing them here would take
    wait: float = 0.0  # of `there`, for the pool's earlier work

    def sooner(self, neighbours: int) -> bool:
        assert self.there is not None and self.here is not None  # or it is only tried
        if not neighbours:
            return self.there <= self.here
        return self.there - self.wait <= BESIDE * self.here and self.there <= BESIDE_QUEUED * self.here


@dataclass(frozen=True)
class PromptLoad:
    tokens: Sequence[int]
    first: int  # token without KV
    salt: bytes | None
    waiting: int  # tokens that are to be computed here before
    neighbours: int  # requests that decode here

    @property
    def missing(self) -> int:
        return len(self.tokens) - self.first


class PrefillChoice:
    """Where KV of a prompt is computed: here, or by which prefill pool.

    here    [ others' prompts ][ this one ]        whoever decodes meanwhile waits longer for each token
    there   [ its queue ][ all that it has no KV of ][ exposed ][ the end of the step here ][ a step of the last row ]
    """

    def __init__(self, least: int | None, ordered: Callable[[PrefillPool], int]) -> None:
        """`least`: missing tokens from which on prompts are sent, or None. `ordered`: a pool's tokens left for us."""
        self.here = LocalSeconds()
        self._least, self._ordered = least, ordered

    def option(self, prompt: PromptLoad, pools: Sequence[PrefillPool], now: float) -> PrefillOption | None:
        if prompt.missing < (FEW if self._least is None else self._least):
            return None
        options = [self._at(pool, prompt) for pool in pools if pool.takes(len(prompt.tokens), now)]
        if not options:
            return None
        best = min(options, key=lambda one: (-1.0 if one.there is None else one.there, self._ordered(one.pool)))
        if self._least is not None:
            return best
        if best.there is None or best.here is None:
            return best if prompt.missing >= TRIAL else None
        if best.sooner(prompt.neighbours):
            best.pool.retrials = 0
            return best
        return self._retrial(options, now) if prompt.missing >= TRIAL else None

    def _at(self, pool: PrefillPool, prompt: PromptLoad) -> PrefillOption:
        cached, token, own = pool.told.known(prompt.salt, prompt.tokens), pool.token_seconds, self.here.token
        left = LEFT * self.here.step.value if prompt.neighbours else 0.0
        here = None if own is None else own * (prompt.waiting + prompt.missing) + left
        if token is None or pool.load is None:
            return PrefillOption(pool, cached, None, here)
        wait = token * max(pool.load.queued_tokens, self._ordered(pool))
        computing = token * (len(prompt.tokens) - cached)
        there = wait + computing + pool.exposed.at(prompt.missing) + self.here.step.value + left
        return PrefillOption(pool, cached, there, here, wait)

    def _retrial(self, options: Sequence[PrefillOption], now: float) -> PrefillOption | None:
        for option in options:
            pool = option.pool
            if now - pool.asked >= RETRIAL * 2.0 ** min(pool.retrials, MAX_RETRIALS):
                pool.retrials += 1
                return option
        return None


class LocalSeconds:
    LARGE = 64  # tokens of prompts in a forward that a token's time is learned from

    def __init__(self) -> None:
        self.step = RecentMean(0.1)  # of a forward without any
        self._rate = RecentRate(0.9)

    def observe(self, tokens: int, seconds: float) -> None:
        if tokens >= self.LARGE:
            self._rate.add(tokens, seconds)
        elif not tokens:
            self.step.add(seconds)

    @property
    def token(self) -> float | None:
        return 1 / self._rate.value if self._rate.value else None
