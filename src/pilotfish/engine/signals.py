"""How a worker's process ends: by signals that its loop looks at."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable


class Stopped(BaseException):
    """A signal came before there was a loop to end."""


class Signals:
    """SIGTERM, SIGINT, and SIGHUP, which tells that the parent is gone: once `wake` is set they set `stopped` and call
    it; before they raise Stopped."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.received = 0
        self.wake: Callable[[], None] | None = None

    def __enter__(self) -> Signals:
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        self._before = {number: signal.signal(number, self._stop) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, _: object) -> None:
        first, self.received = not self.stopped.is_set(), number
        self.stopped.set()
        if self.wake is not None:
            self.wake()
        elif first:
            raise Stopped
