"""A target's view of its draft pools: whether each lives, its load, why it does not serve, what was dropped of it.

    ready ──── silent for SILENCE ────► silent ──── silent for longer than its patience ────► lost
      ▲                                    │                                                   │
      └───────────── any message ──────────┴──────────────── Load, its answer to Hello ────────┘

A silent pool keeps its sessions, because a chip that reads a long prompt may have no time to answer: closing them would
waste its work. It gets no new ones, and hears of later commits when it speaks again. A pool that said for how long it
would be busy is not silent before. One that drains gets no new sessions either, and its own go at their next commit
where another pool takes them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pilotfish.core.drafting.echo import EchoClock
from pilotfish.core.drafting.error_reports import ErrorReports
from pilotfish.core.drafting.messages import Load, Notice, Peer
from pilotfish.core.drafting.told_prefixes import ToldPrefixes
from pilotfish.core.features.feature_sending import FEATURE_DROPS, FeatureLine
from pilotfish.core.scheduling.calibration import Calibration

#: Seconds between two Hellos: sooner while nothing has answered.
GREETING, FIRST_GREETING = 1.0, 0.05
#: Seconds without a message after which a pool is silent. It sends its load five times a second.
SILENCE = 1.0
#: Seconds of silence after which its sessions go to another pool that answers, and after which they are closed where
#: there is none; twice as many each time that it was given up, up to 2 ** MAX_DOUBLINGS times.
PATIENCE, PATIENCE_ALONE = 1.0, 30.0
MAX_DOUBLINGS = 5
#: Seconds of answers after which a pool that was silent or lost is reported as back, and after which it is trusted.
BACK, TRUSTED = 5.0, 60.0
#: Malformed frames after which a pool is left alone, and for how long.
MAX_FAULTS, PAUSE = 32, 5.0

#: The longest time, in seconds, that a pool may say it is busy.
MAX_BUSY = 30.0

#: The meaning of each count of `Drops`. Healthy drafts have late and repeated nodes, and stale frames.
REASONS = {
    "late_nodes": "nodes whose parents were gone",
    "repeated_nodes": "nodes that were there already",
    "dropped_nodes": "nodes against the protocol",
    "stale_frames": "frames of ended sessions, older generations or earlier pushes",
    "malformed_frames": "frames that are no message",
    "unknown_messages": "messages of types that are not known here",
    "gaps": "Trees that did not follow the one before",
    "resyncs": "sessions that it could not follow",
    "refusals": "sessions that it refused",
    "pauses": "sessions that it had no room for",
    "errors": "frames of this target that it could not use",
}
#: Those that no draft has reason to cause.
FAULTS = frozenset({"dropped_nodes", "malformed_frames", "refusals", "errors"})
#: Seconds until a reason that was logged is logged again: twice as many each time.
FIRST_PAUSE, LAST_PAUSE = 60.0, 3600.0


@dataclass
class PoolScore:
    trees: int = 0  # frames that were attached
    nodes: int = 0  # in them
    verified: int = 0
    accepted: int = 0
    calibration: Calibration = field(default_factory=Calibration)
    _verified: list[float] = field(default_factory=list)  # scores in the last step
    _accepted: list[float] = field(default_factory=list)

    def observe(self, verified: Sequence[float], accepted: Sequence[float]) -> None:
        """Scores of its nodes in one sequence's tree, and of those that were accepted."""
        self.verified += len(verified)
        self.accepted += len(accepted)
        self._verified += verified
        self._accepted += accepted

    def end_step(self) -> None:
        if self._verified:
            self.calibration.observe(np.array(self._verified), np.array(self._accepted))
            self._verified, self._accepted = [], []

    def calibrated(self, scores: Sequence[float]) -> list[float]:
        """Log of the chance that its nodes of these scores are accepted, as far as was seen."""
        chances: list[float] = np.log(self.calibration.chances(np.array(scores))).tolist()
        return chances


@dataclass
class _LastNotice:
    count: int
    at: float
    pause: float = FIRST_PAUSE


class Drops:
    """Counts by reason what a target dropped of one pool's messages. The first of a reason gives a notice; later ones
    are summed up in one notice now and then."""

    def __init__(
        self,
        pool: str,
        notices: list[Notice],
        reasons: Mapping[str, str] = REASONS,
        faults: Collection[str] = FAULTS,
    ) -> None:
        """`reasons`, and the meaning of each; those in `faults` are warnings."""
        self.counts = dict.fromkeys(reasons, 0)
        self._reasons, self._faults = reasons, faults
        self._pool = pool
        self._notices = notices
        self._last: dict[str, _LastNotice] = {}

    @property
    def occurred(self) -> dict[str, int]:
        return {reason: count for reason, count in self.counts.items() if count}

    def add(self, reason: str, count: int, now: float, detail: str = "") -> None:
        """`detail` is for the log alone."""
        if count:
            self.counts[reason] += count
            last = self._last.get(reason)
            if last is None or now - last.at >= last.pause:
                self._notify(reason, last, now, detail)

    def _notify(self, reason: str, last: _LastNotice | None, now: float, detail: str) -> None:
        new = self.counts[reason] - (last.count if last else 0)
        pause = FIRST_PAUSE if last is None else min(2 * last.pause, LAST_PAUSE)
        self._last[reason] = _LastNotice(self.counts[reason], now, pause)
        since = f" in {now - last.at:.0f} s" if last else ""
        text = f"{self._pool}: {self._reasons[reason]}: {new}{since}{f' ({detail})' if detail else ''}"
        self._notices.append(Notice(logging.WARNING if reason in self._faults else logging.INFO, text))


@dataclass
class DraftPool:
    """`ready` while it answers. A lost one is greeted on, and ready again when it answers."""

    name: str
    peer: Peer
    ready: bool = False
    silent: bool = False  # it says nothing, but is connected
    draining: bool = False  # it is to leave
    load: Load | None = None
    refusal: str | None = None  # why it does not serve this target
    sessions: set[int] = field(default_factory=set)  # numbers of this target's sessions
    told: ToldPrefixes = field(default_factory=ToldPrefixes)  # since it last began to answer
    features: FeatureLine = field(default_factory=FeatureLine)
    target_digest: str = ""  # of this target's embedding, where a draft may ask for its features
    role: str = "draft"  # or shadow, in notices
    echo: EchoClock = field(default_factory=EchoClock)
    reports: ErrorReports = field(default_factory=ErrorReports)
    score: PoolScore = field(default_factory=PoolScore)
    losses: int = 0  # times that it fell silent or was lost
    notices: list[Notice] = field(default_factory=list)  # for the log
    drops: Drops = field(init=False)
    _last_heard: float = 0.0
    _busy_until: float = 0.0
    _answers_since: float = 0.0
    _last_greeted: float = -GREETING
    _given_up: int = 0  # times, one after the other
    _unreported_losses: int = 0  # since it was last reported as back
    _faults: int = 0
    _reported_refusal: str = ""  # since it last served
    _refusal_reported: float = -FIRST_PAUSE  # when
    _left_alone_until: float = 0.0
    _compared: str = ""  # the first digest that it told of

    def __post_init__(self) -> None:
        self.drops = Drops(self.name, self.notices)

    @property
    def expected_load(self) -> float:
        """Sessions that it will have: those of other targets as it last said, and ours. Equal pools take turns."""
        others = 0 if self.load is None else max(self.load.sessions - self.load.own_sessions, 0)
        return others + len(self.sessions)

    @property
    def takes_sessions(self) -> bool:
        return self.ready and not self.draining

    @property
    def revision(self) -> str:
        """Of its draft, as its operator names it; "" until it has told."""
        return "" if self.load is None else self.load.revision

    def can(self, capability: str) -> bool:
        return self.load is not None and capability in self.load.capabilities

    def is_busy(self, now: float) -> bool:
        return now < self._busy_until

    def quiet(self, now: float) -> float:
        """Seconds without a word, beyond what it said."""
        return now - max(self._last_heard, self._busy_until)

    @property
    def feature_drops(self) -> dict[str, int]:
        """Frames of features that it could not use, by reason, of the reasons that are known here."""
        told = {} if self.load is None else self.load.own_feature_drops
        return {reason: told[reason] for reason in FEATURE_DROPS if reason in told}

    def keeps_sessions(self, now: float, *, alone: bool) -> bool:
        """Whether its sessions stay with it; `alone`: no other pool answers."""
        patience = (PATIENCE_ALONE if alone else PATIENCE) * 2.0 ** min(self._given_up, MAX_DOUBLINGS)
        return self.ready or (self.silent and self.quiet(now) <= patience)

    def give_up(self) -> None:
        self._given_up += self.silent
        self.silent = False

    def heard_load(self, load: Load, now: float) -> None:
        self.load, self._faults, self._last_heard = load, 0, now
        self._busy_until = now + min(load.busy_ms / 1000, MAX_BUSY) if load.busy_ms else 0.0
        self.echo.hear(load.echo, now)
        self.features.came(load.own_features)
        self._compare(load.target_digest)
        if now >= self._left_alone_until:
            self._answers(now)

    def _compare(self, digest: str) -> None:
        """The first digest of another target gives a notice. Its features are no errors, and may be good enough."""
        if self._compared or not (digest and self.target_digest):
            return
        self._compared = digest
        if digest != self.target_digest:
            other = (
                f"it expects features of a target with other embeddings ({digest[:12]}, not {self.target_digest[:12]})"
            )
            self._warn(
                f"{self.name}: {other}: its guesses may seldom be right; its --target should be this target's model"
            )

    def heard_of_session(self, now: float) -> None:
        self._last_heard = now
        if self.silent:
            self._answers(now)

    def _answers(self, now: float) -> None:
        if not self.ready:
            self._answers_since = now
            self.told.clear()
        self.ready, self.silent, self.refusal = True, False, None

    def refused(self, reason: str, now: float) -> None:
        """It does not serve this target, and is asked again in a while. The first time gives a notice, and another
        reason does so later, if not soon: who is refused is told no more often than that."""
        self.drops.counts["refusals"] += 1
        if reason != self._reported_refusal and now - self._refusal_reported >= FIRST_PAUSE:
            self._warn(f"{self.role}_pool: {self.name} refused: {reason}; the target serves without it")
            self._reported_refusal, self._refusal_reported = reason, now
        self.refusal, self.ready, self.silent, self._last_heard = reason, False, False, now
        self._left_alone_until = max(self._left_alone_until, now + GREETING)

    def malformed(self, reason: str, now: float) -> None:
        """It sent a frame that is no message. After too many it is left alone for a while."""
        self.drops.add("malformed_frames", 1, now, reason)
        self._faults += now >= self._left_alone_until
        if self._faults >= MAX_FAULTS:
            self._faults, self.ready, self.silent, self._left_alone_until = 0, False, False, now + PAUSE
            self._warn(f"{self.name} is left alone for {PAUSE:g} s: it sent {MAX_FAULTS} frames that are no message")

    def tick(self, now: float) -> None:
        if self.ready and self.quiet(now) > SILENCE:
            self._lose(f"{self.name} has been silent for {SILENCE:.1f} s")
            self.silent = True
        if self.ready and now - self._answers_since >= TRUSTED:
            self._given_up = 0
        if self.ready and self._unreported_losses and now - self._answers_since >= BACK:
            times = "once" if self._unreported_losses == 1 else f"{self._unreported_losses} times"
            self._warn(f"{self.name} is back; it was silent or gone {times}")
            self._unreported_losses = 0
        if self.ready and self._reported_refusal and now - self._answers_since >= BACK:
            self._warn(f"{self.name} serves this target now; it refused before")
            self._reported_refusal = ""

    def disconnected(self, reason: str) -> None:
        """It is greeted until it answers again."""
        self.silent = False
        if self.ready:
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        """The first loss gives a notice, unless it was to leave; further ones are counted until it is back."""
        self.ready = False
        self.losses += 1
        self._unreported_losses += not self.draining
        if self._unreported_losses == 1 and not self.draining:
            self._warn(f"{reason}; its sequences go on without it")

    def _warn(self, text: str) -> None:
        self.notices.append(Notice(logging.WARNING, text))

    def hello_due(self, now: float) -> bool:
        waited = now - self._last_greeted
        if waited < (GREETING if self.ready or self.silent or self.refusal else FIRST_GREETING):
            return False
        self._last_greeted = now
        return True
