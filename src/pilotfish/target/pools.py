"""What a target knows of a draft pool: whether it lives, how busy it is, why it does not serve."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from pilotfish.wire.channel import Peer
from pilotfish.wire.messages import Load

logger = logging.getLogger(__name__)

#: Seconds between two Hellos: sooner while nothing has answered.
GREETING, FIRST_GREETING = 1.0, 0.05
#: Seconds of silence after which a pool is lost. It sends its load five times a second.
SILENCE = 1.0
#: Malformed frames after which a pool is left alone, and for how long.
MAX_FAULTS, PAUSE = 32, 5.0


@dataclass
class Pool:
    """`ready` while it answers. A lost one is greeted on, and ready again when it answers."""

    name: str  # its endpoint
    peer: Peer
    ready: bool = False
    load: Load | None = None
    refusal: str | None = None  # why it does not serve this target
    sessions: set[int] = field(default_factory=set)  # ours
    losses: int = 0
    _heard: float = 0.0
    _greeted: float = -GREETING
    _faults: int = 0
    _told: str = ""  # the refusal that was logged last
    _alone_until: float = 0.0

    @property
    def expected_load(self) -> float:
        """Sessions that it will have: those of others as it last said, and ours. Equal pools take turns."""
        others = 0 if self.load is None else max(self.load.sessions - self.load.own_sessions, 0)
        return others + len(self.sessions)

    def heard(self, load: Load, now: float) -> None:
        """It has answered."""
        self.load, self._heard, self._faults = load, now, 0
        if now >= self._alone_until:
            self.ready, self.refusal = True, None

    def refused(self, reason: str, now: float) -> None:
        """It does not serve this target; it is asked again in a while. Logged where it did serve; before that whoever
        waits for it tells."""
        if self.load is not None and reason != self._told:
            logger.warning("%s refused: %s", self.name, reason)
            self._told = reason
        self.refusal, self.ready, self._heard = reason, False, now
        self._alone_until = max(self._alone_until, now + GREETING)

    def fault(self, now: float) -> bool:
        """It sent what is no message; whether it has done so too often."""
        self._faults += now >= self._alone_until
        if self._faults < MAX_FAULTS:
            return False
        self._faults, self.ready, self._alone_until = 0, False, now + PAUSE
        return True

    def tick(self, now: float) -> None:
        """Notice silence."""
        if now - self._heard > SILENCE:
            self.lost(f"{self.name} has been silent for {SILENCE:.1f} s")

    def lost(self, reason: str) -> None:
        """It is gone; it is greeted until it answers again."""
        if self.ready:
            self.ready = False
            self.losses += 1
            logger.warning("%s; its sequences go on without it", reason)

    def hello_due(self, now: float) -> bool:
        """Whether to greet it now."""
        waited = now - self._greeted
        if waited < (GREETING if self.ready or self.refusal else FIRST_GREETING):
            return False
        self._greeted = now
        return True
