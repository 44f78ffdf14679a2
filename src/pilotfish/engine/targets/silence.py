from __future__ import annotations

from dataclasses import dataclass

#: Longest time between two looks that counts as silence. A later look means that this process, or the whole machine,
#: stood still itself.
LONGEST_LOOK = 0.5


@dataclass
class Silence:
    """Seconds since a process was last heard, without the time in which this process stood still."""

    seconds: float = 0.0
    _looked: float | None = None  # when the last look was

    def heard(self) -> None:
        self.seconds = 0.0

    def look(self, now: float) -> float:
        if self._looked is not None:
            self.seconds += min(now - self._looked, LONGEST_LOOK)
        self._looked = now
        return self.seconds
