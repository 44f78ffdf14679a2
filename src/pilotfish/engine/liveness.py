"""How long nothing was heard of a process, and how long it takes to start. Times are arguments, in seconds."""

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


class StartTime:
    """How long a target takes from its process's start until it is ready."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._last: float | None = None  # seconds that the last one took

    def begin(self, now: float) -> None:
        self._began = now

    def end(self, now: float) -> None:
        self._last = now - self._began

    def left(self, now: float) -> float:
        """Seconds, if it takes as long as the last one; of the first as long again as it has taken."""
        passed = now - self._began
        return passed if self._last is None else max(self._last - passed, 0.0)
