"""Virtual time: actions at moments, done in their order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Events:
    """Those of one moment are done in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self._planned: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, time: float, action: Callable[[], None]) -> None:
        """`time` is not before the present."""
        heapq.heappush(self._planned, (time, next(self._numbers), action))

    def run(self, until: Callable[[], bool]) -> None:
        """Until that holds, or nothing is planned."""
        while self._planned and not until():
            self.now, _, action = heapq.heappop(self._planned)
            action()
