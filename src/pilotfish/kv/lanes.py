"""A thread for work that may take long, or for ever; and what waits in a thread's queue."""

import itertools
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, PriorityQueue, SimpleQueue
from typing import TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)

#: Jobs that are waited for, and jobs that are not.
URGENT, IDLE = 0, 1
_END = 2


def drained(queue: SimpleQueue[T], timeout: float = 0.0) -> list[T]:
    """All that is in it, in order; waits up to `timeout` seconds for the first."""
    found = list[T]()
    with suppress(Empty):
        if timeout > 0:
            found.append(queue.get(timeout=timeout))
        while True:
            found.append(queue.get_nowait())
    return found


class Lane:
    """Jobs of one thread, urgent ones first. A job that raises is logged and ends alone."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._jobs: PriorityQueue[tuple[int, int, Callable[[], None]]] = PriorityQueue()
        self._numbers = itertools.count()
        self._began: float | None = None  # the present job
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, urgency: int, job: Callable[[], None]) -> None:
        self._jobs.put((urgency, next(self._numbers), job))

    def stuck(self, seconds: float) -> bool:
        began = self._began
        return began is not None and self._clock() - began > seconds

    def close(self, seconds: float) -> bool:
        self.put(_END, lambda: None)
        self._thread.join(max(seconds, 0.0))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            urgency, _, job = self._jobs.get()
            if urgency == _END:
                return
            self._began = self._clock()
            try:
                job()
            except Exception:
                logger.exception("%s: a job failed", threading.current_thread().name)
            self._began = None
