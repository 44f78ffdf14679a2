"""Forwards held back to the speed of another device."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pilotfish.plan.pace import Pace

#: The share of overruns above which a run says nothing about the emulated device.
MAX_OVERRUN_SHARE = 0.01
#: Seconds before the deadline at which sleeping ends: a kernel wakes a sleeper 50 to 100 us late.
SPIN = 200e-6


def _sleep(seconds: float) -> None:
    """Other threads get the interpreter either way; `time.sleep(0)` would take up to 100 us."""
    if seconds > 0:
        time.sleep(seconds)
    else:
        os.sched_yield()


@dataclass(frozen=True)
class Pacing:
    role: str
    pace: Pace
    forwards: int
    overruns: int  # forwards that took longer than their pace by themselves

    @property
    def share(self) -> float:
        """Of overruns in all forwards."""
        return self.overruns / self.forwards if self.forwards else 0.0

    @property
    def valid(self) -> bool:
        return self.share <= MAX_OVERRUN_SHARE

    def __str__(self) -> str:
        row = f" ({1000 * self.pace.seconds(1):.2f} ms a row)" if "@" in self.pace.text else ""
        return f"{self.role} {self.pace.text}{row}, overruns {self.overruns} of {self.forwards}"


class Pacer:
    """Lets a forward return when that of the emulated device would, and counts those that took longer."""

    def __init__(
        self,
        role: str,
        pace: Pace,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = _sleep,
    ) -> None:
        self._role = role
        self._pace = pace
        self._clock = clock
        self._sleep = sleep
        self.reset()

    def reset(self) -> None:
        """Count from here on."""
        self._forwards = self._overruns = 0

    def pacing(self) -> Pacing:
        return Pacing(self._role, self._pace, self._forwards, self._overruns)

    def hold(self, began: float, rows: int) -> None:
        """After a forward of `rows` rows, and sampling: returns when its time is over. `began` is of the clock."""
        deadline = began + self._pace.seconds(rows)
        self._forwards += 1
        self._overruns += self._clock() > deadline
        while (left := deadline - self._clock()) > 0:
            self._sleep(max(left - SPIN, 0.0))

    @contextmanager
    def held(self, rows: int) -> Iterator[None]:
        """Hold back all that is done within."""
        began = self._clock()
        yield
        self.hold(began, rows)
