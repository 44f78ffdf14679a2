"""How long nothing was heard of a process."""

from __future__ import annotations

#: Seconds that the time between two looks counts at most: a look that comes later than that was late because this
#: process, or the whole machine, had stopped, and the other one is not to blame.
LONGEST_LOOK = 0.5


class Silence:
    """Seconds since a process was last heard, as far as this process ran meanwhile."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._looked: float | None = None

    def heard(self) -> None:
        self.seconds = 0.0

    def look(self, now: float) -> float:
        """The silence until `now`."""
        if self._looked is not None:
            self.seconds += min(now - self._looked, LONGEST_LOOK)
        self._looked = now
        return self.seconds
