"""The guard cuts a variant that has become slower than the holdout, and tries it again later.

          evidence that it is slower                    pause is over
    live ────────────────────────────► cut ───────────────────────────────► trial
      ▲                                 ▲      evidence that it is slower     │
      │                                 └────── the next pause is longer ─────┤
      └──────────────────────── evidence that it is not ──────────────────────┘

docs/rollout.md has the rule and its limits."""

from collections import deque
from collections.abc import Mapping, Sequence
from math import inf
from typing import Literal

from msgspec import Struct

from pilotfish.operate.guarding.guard_readings import NOTHING, GuardReading
from pilotfish.operate.guarding.variant_evidence import VariantEvidence

#: Events that are kept.
HISTORY = 256
#: A live variant may take so much more time a token than the holdout.
ALLOWANCE = 0.05
#: Seconds from a cut to the first trial, and at most from a later cut to its trial.
PAUSE, LONGEST_PAUSE = 30.0, 600.0
#: Share of a variant's requests that speculate in a trial, at first.
TRIAL = 0.05
#: Twice as many do after so many seconds that have decided nothing, each time.
PATIENCE = 30.0

VariantState = Literal["live", "trial", "cut"]
EventKind = Literal["cut", "trial", "restored", "failed trial"]


class GuardEvent(Struct, frozen=True, kw_only=True):
    """A variant's state has changed. `at` is the time of the observation that did it."""

    at: float
    variant: str
    kind: EventKind
    reason: str


class GuardedVariant(Struct, frozen=True, kw_only=True):
    """How a variant stands. Times are as those that the guard was told."""

    state: VariantState
    since: float | None  # None: since the guard began
    reason: str  # for the last change
    next_trial: float | None  # of one that is cut


class VariantGuard:
    def __init__(self, name: str) -> None:
        self.standing = GuardedVariant(state="live", since=None, reason="", next_trial=None)
        self._name = name
        self._pause = PAUSE
        self._restored = -inf
        self._seen = -inf  # the last observation
        self.forget_evidence()

    def forget_evidence(self) -> None:
        self._evidence = VariantEvidence(ALLOWANCE)

    @property
    def share(self) -> float:
        """Share of its requests that may speculate. It is not too small for few requests, which would tell nothing."""
        if self.standing.state != "trial":
            return float(self.standing.state == "live")
        doublings = int((self._seen - (self.standing.since or 0.0)) / PATIENCE)
        return min(1.0, TRIAL * 2.0 ** min(doublings, 64))

    def observe(self, own: GuardReading, holdout: GuardReading, now: float) -> GuardEvent | None:
        self._seen = now
        if self.standing.state == "live":
            reason = self._evidence.collapse(own, holdout)
            return self._cut(reason, now) if reason else None
        if self.standing.next_trial is not None:
            return self._try_again(now) if now >= self.standing.next_trial else None
        slower = self._evidence.is_slower(own, holdout)
        return None if slower is None else self._fail(now) if slower else self._restore(now)

    def _cut(self, reason: str, now: float) -> GuardEvent:
        soon = now - self._restored < LONGEST_PAUSE  # after a trial that should have failed
        self._pause = self._longer_pause() if soon else PAUSE
        return self._change("cut", "cut", reason, now)

    def _try_again(self, now: float) -> GuardEvent:
        self._evidence.start()
        return self._change("trial", "trial", f"{self._pause:g} s after the cut", now)

    def _restore(self, now: float) -> GuardEvent:
        self._restored = now
        return self._change("live", "restored", f"in the trial {self._evidence.figures}", now)

    def _fail(self, now: float) -> GuardEvent:
        self._pause = self._longer_pause()
        return self._change("cut", "failed trial", f"in the trial {self._evidence.figures}", now)

    def _longer_pause(self) -> float:
        return min(2 * self._pause, LONGEST_PAUSE)

    def _change(self, state: VariantState, kind: EventKind, reason: str, now: float) -> GuardEvent:
        next_trial = now + self._pause if state == "cut" else None
        self.standing = GuardedVariant(state=state, since=now, reason=reason, next_trial=next_trial)
        return GuardEvent(at=now, variant=self._name, kind=kind, reason=reason)


class Guard:
    """It reads no clock: times are seconds of any monotonic clock."""

    def __init__(self, holdout: str, variants: Sequence[str]) -> None:
        """`variants` may name the holdout too; with a `holdout` of "" nothing is ever cut."""
        self._holdout = holdout
        self._variants: dict[str, VariantGuard] = {}
        self.events: deque[GuardEvent] = deque(maxlen=HISTORY)
        self.set_variants(holdout, variants)

    def set_variants(self, holdout: str, variants: Sequence[str]) -> None:
        """Known variants keep their state; another holdout voids the evidence."""
        known = self._variants
        if holdout != self._holdout:
            for guarded in known.values():
                guarded.forget_evidence()
        others = [name for name in variants if name != holdout]
        self._holdout = holdout
        self._variants = {name: known.get(name) or VariantGuard(name) for name in others}

    def observe(self, readings: Mapping[str, GuardReading], now: float) -> list[GuardEvent]:
        holdout = readings.get(self._holdout, NOTHING)
        observed = [one.observe(readings.get(name, NOTHING), holdout, now) for name, one in self._variants.items()]
        events = [event for event in observed if event is not None]
        self.events.extend(events)
        return events

    def share(self, variant: str) -> float:
        """Share of its requests that may speculate; 1 for the holdout."""
        return 1.0 if variant == self._holdout else self._variants[variant].share

    def told(self) -> dict[str, GuardedVariant]:
        return {name: guarded.standing for name, guarded in self._variants.items()}
