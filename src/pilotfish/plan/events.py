"""Virtual time, in seconds."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count


class Events:
    """Simultaneous actions run in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._planned: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._planned, (time, next(self._numbers), action))

    def run(self, until: Callable[[], bool]) -> None:
        while self._planned and not until():
            self.now, _, action = heapq.heappop(self._planned)
            action()

    def run_to(self, time: float) -> None:
        self.run(lambda: self._planned[0][0] > time)
        self.now = max(self.now, time)


@dataclass
class VirtualClock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now
