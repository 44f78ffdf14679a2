"""How a worker's process ends: by signals that its loop looks at."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable

from pilotfish.engine.process import supervised


class Stopped(BaseException):
    """A signal came before there was a loop to end."""


def heeded(numbers: Iterable[int]) -> list[int]:
    """Those that this process was not started to ignore, as `nohup` and a shell's background jobs are; always
    SIGTERM."""
    return [n for n in numbers if n == signal.SIGTERM or signal.getsignal(n) != signal.SIG_IGN]


class Signals:
    """SIGTERM, SIGINT, and SIGHUP, which tells that the parent is gone: once `wake` is set they call it, with `stopped`
    true; before they raise Stopped. Where nobody supervises this process only those that are `heeded` do.

    They come while another one is handled too: a parent's end sends SIGHUP for each of its threads. So nothing here
    waits for a lock that the interrupted handler may hold."""

    def __init__(self) -> None:
        self._stopped = False
        self.received = 0
        self.wake: Callable[[], None] | None = None

    def stopped(self) -> bool:
        """Whether one has come."""
        return self._stopped

    def __enter__(self) -> Signals:
        all_three = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        numbers = all_three if supervised() else heeded(all_three)
        self._before = {number: signal.signal(number, self._stop) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, _: object) -> None:
        first, self._stopped, self.received = not self._stopped, True, number
        if self.wake is not None:
            self.wake()
        elif first:
            raise Stopped
