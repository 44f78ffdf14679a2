import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from pilotfish.config.hardware.pace import Pace

logger = logging.getLogger(__name__)

#: The share of overruns above which a run says nothing about the emulated device.
MAX_OVERRUN_SHARE = 0.01
#: Forwards whose times are kept.
KEPT = 1 << 14
#: Seconds before the deadline at which sleeping ends: a kernel wakes a sleeper 50 to 100 us late.
SPIN = 200e-6


@dataclass
class Pacer:
    role: str
    pace: Pace
    forwards: int = 0
    overruns: int = 0
    #: Of its pace, what each of the last forwards took by itself: above 1 it overran.
    taken: deque[float] = field(default_factory=partial(deque, maxlen=KEPT), compare=False)

    @property
    def share(self) -> float:
        return self.overruns / self.forwards if self.forwards else 0.0

    @property
    def valid(self) -> bool:
        return self.share <= MAX_OVERRUN_SHARE

    def __str__(self) -> str:
        row = f" ({1000 * self.pace.seconds(1):.2f} ms a row)" if "@" in self.pace.text else ""
        return f"{self.role} {self.pace.text}{row}, overruns {self.overruns} of {self.forwards}"

    def report(self) -> None:
        if self.valid:
            logger.info("paced: %s", self)
        else:
            logger.warning("this run is invalid, its device is too slow: %s", self)

    def reset(self) -> None:
        self.forwards = self.overruns = 0
        self.taken.clear()

    def note(self, taken: float) -> None:
        self.forwards += 1
        self.overruns += taken > 1
        self.taken.append(taken)

    def hold(self, began: float, rows: int) -> None:
        """`began` is by `time.perf_counter`."""
        seconds = self.pace.seconds(rows)
        self.note((time.perf_counter() - began) / seconds)
        deadline = began + seconds
        while (left := deadline - time.perf_counter()) > 0:
            _sleep(max(left - SPIN, 0.0))

    @contextmanager
    def held(self, rows: int) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.hold(began, rows)


def _sleep(seconds: float) -> None:
    """The GIL is released either way; `time.sleep(0)` would take up to 100 us."""
    if seconds > 0:
        time.sleep(seconds)
    else:
        os.sched_yield()
