"""What a target dropped of a pool's messages, by reason: counted, and said in the log now and then."""

from __future__ import annotations

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)

#: What each reason counts. Healthy drafts have late and repeated nodes, and stale frames.
REASONS = {
    "late_nodes": "nodes whose parents were gone",
    "repeated_nodes": "nodes that were there already",
    "dropped_nodes": "nodes against the protocol",
    "stale_frames": "frames of ended sessions, older generations or earlier pushes",
    "malformed_frames": "frames that are no message",
    "gaps": "Trees that did not follow the one before",
    "resyncs": "sessions that it could not follow",
    "refusals": "sessions that it refused",
}
#: Those that no draft has reason to cause.
FAULTS = frozenset({"dropped_nodes", "malformed_frames", "refusals"})
#: Seconds until a reason that was logged is logged again: twice as many each time.
FIRST_PAUSE, LAST_PAUSE = 60.0, 3600.0


@dataclass
class _Told:
    """What the log says of a reason."""

    count: int
    at: float
    pause: float = FIRST_PAUSE


class Drops:
    """Of one pool. The first of a reason is a line in the log; how many more there were is one later, with the next."""

    def __init__(self, pool: str) -> None:
        self.counts = dict.fromkeys(REASONS, 0)
        self._pool = pool
        self._told: dict[str, _Told] = {}

    @property
    def occurred(self) -> dict[str, int]:
        """Counts above 0."""
        return {reason: count for reason, count in self.counts.items() if count}

    def add(self, reason: str, count: int, now: float, detail: str = "") -> None:
        """`detail` is for the log alone."""
        if count:
            self.counts[reason] += count
            told = self._told.get(reason)
            if told is None or now - told.at >= told.pause:
                self._tell(reason, told, now, detail)

    def _tell(self, reason: str, told: _Told | None, now: float, detail: str) -> None:
        level = logging.WARNING if reason in FAULTS else logging.INFO
        new = self.counts[reason] - (told.count if told else 0)
        pause = FIRST_PAUSE if told is None else min(2 * told.pause, LAST_PAUSE)
        self._told[reason] = _Told(self.counts[reason], now, pause)
        since = f" in {now - told.at:.0f} s" if told else ""
        logger.log(level, "%s: %s: %d%s%s", self._pool, REASONS[reason], new, since, f" ({detail})" if detail else "")
