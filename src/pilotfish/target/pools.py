"""What a target knows of a draft pool: whether it lives, how busy it is, why it does not serve.

    ready ──── silent for SILENCE ────► silent ──── silent for longer than its patience ────► lost
      ▲                                    │                                                   │
      └───────────── a word of it ─────────┴──────────────── Load, its answer to Hello ────────┘

A silent pool keeps the sessions that it has, because a chip that reads a long prompt may have no time for a word: to
close them would waste what it computes. It gets no new ones, and what is committed is told when it speaks again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from pilotfish.core.messages import Load, Peer
from pilotfish.target.drops import Drops

logger = logging.getLogger(__name__)

#: Seconds between two Hellos: sooner while nothing has answered.
GREETING, FIRST_GREETING = 1.0, 0.05
#: Seconds without a word after which a pool is silent. It sends its load five times a second.
SILENCE = 1.0
#: Seconds of silence after which its sessions go to another pool that answers, and after which they are closed where
#: there is none; twice as many each time that it was given up, up to 2 ** MAX_DOUBLINGS times.
PATIENCE, PATIENCE_ALONE = 1.0, 30.0
MAX_DOUBLINGS = 5
#: Seconds of answers after which a pool that was silent or lost is said to be back, and after which it is trusted anew.
BACK, TRUSTED = 5.0, 60.0
#: Malformed frames after which a pool is left alone, and for how long.
MAX_FAULTS, PAUSE = 32, 5.0


@dataclass
class Pool:
    """`ready` while it answers. A lost one is greeted on, and ready again when it answers."""

    name: str
    peer: Peer
    ready: bool = False
    silent: bool = False  # it says nothing, but is connected
    load: Load | None = None
    refusal: str | None = None  # why it does not serve this target
    sessions: set[int] = field(default_factory=set)  # ours
    losses: int = 0  # times that it fell silent or was lost
    drops: Drops = field(init=False)
    _heard: float = 0.0
    _answers_since: float = 0.0
    _greeted: float = -GREETING
    _given_up: int = 0  # times, one after the other
    _untold: int = 0  # losses since it was last said to be lost
    _faults: int = 0
    _told: str = ""  # the refusal that was logged last
    _alone_until: float = 0.0

    def __post_init__(self) -> None:
        self.drops = Drops(self.name)

    @property
    def expected_load(self) -> float:
        """Sessions that it will have: those of others as it last said, and ours. Equal pools take turns."""
        others = 0 if self.load is None else max(self.load.sessions - self.load.own_sessions, 0)
        return others + len(self.sessions)

    def keeps_sessions(self, now: float, *, alone: bool) -> bool:
        """Whether its sessions stay with it; `alone`: no other pool answers."""
        patience = (PATIENCE_ALONE if alone else PATIENCE) * 2.0 ** min(self._given_up, MAX_DOUBLINGS)
        return self.ready or (self.silent and now - self._heard <= patience)

    def give_up(self) -> None:
        """Its sessions were taken from it."""
        self._given_up += self.silent
        self.silent = False

    def heard(self, load: Load, now: float) -> None:
        """It has answered."""
        self.load, self._faults = load, 0
        self._heard = now
        if now >= self._alone_until:
            self._answers(now)

    def spoke(self, now: float) -> None:
        """It sent something of a session."""
        self._heard = now
        if self.silent:
            self._answers(now)

    def _answers(self, now: float) -> None:
        if not self.ready:
            self._answers_since = now
        self.ready, self.silent, self.refusal = True, False, None

    def refused(self, reason: str, now: float) -> None:
        """It does not serve this target; it is asked again in a while. Logged where it did serve; before that whoever
        waits for it tells."""
        self.drops.counts["refusals"] += 1
        if self.load is not None and reason != self._told:
            logger.warning("%s refused: %s", self.name, reason)
            self._told = reason
        self.refusal, self.ready, self.silent, self._heard = reason, False, False, now
        self._alone_until = max(self._alone_until, now + GREETING)

    def fault(self, now: float) -> bool:
        """It sent what is no message; whether it has done so too often."""
        self._faults += now >= self._alone_until
        if self._faults < MAX_FAULTS:
            return False
        self._faults, self.ready, self.silent, self._alone_until = 0, False, False, now + PAUSE
        return True

    def tick(self, now: float) -> None:
        """Notice silence, and its end."""
        if self.ready and now - self._heard > SILENCE:
            self._lose(f"{self.name} has been silent for {SILENCE:.1f} s")
            self.silent = True
        if self.ready and now - self._answers_since >= TRUSTED:
            self._given_up = 0
        if self.ready and self._untold and now - self._answers_since >= BACK:
            times = "once" if self._untold == 1 else f"{self._untold} times"
            logger.warning("%s is back; it was silent or gone %s", self.name, times)
            self._untold = 0

    def lost(self, reason: str) -> None:
        """It is gone; it is greeted until it answers again."""
        self.silent = False
        if self.ready:
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        """The first loss is logged; further ones are counted until it is back."""
        self.ready = False
        self.losses += 1
        self._untold += 1
        if self._untold == 1:
            logger.warning("%s; its sequences go on without it", reason)

    def hello_due(self, now: float) -> bool:
        """Whether to greet it now."""
        waited = now - self._greeted
        if waited < (GREETING if self.ready or self.silent or self.refusal else FIRST_GREETING):
            return False
        self._greeted = now
        return True
