"""Signs of life: how a process gives them, how long another one hears none, and how long a start takes. Times are in
seconds."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from contextlib import closing

import msgspec

from pilotfish.wire.dialing import DialingChannel
from pilotfish.wire.serving import SERVER, Beat

#: Seconds between two beats.
BEAT = 0.5
#: Seconds that the time between two looks counts at most: a look that comes later than that was late because this
#: process, or the whole machine, had stopped, and the other one is not to blame.
LONGEST_LOOK = 0.5


class Heartbeat:
    """A thread that sends a Beat every BEAT seconds until `close`, over a connection of its own. A forward lets other
    threads run, so only a process that stands still is silent; how long its step lasts already, the Beat says."""

    def __init__(self, endpoint: str) -> None:
        #: Seconds that the step at hand has lasted.
        self.step: Callable[[], float] = lambda: 0.0
        self._endpoint = endpoint
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        with closing(DialingChannel((self._endpoint,), secrets.token_bytes(8))) as channel:
            while not self._closing.wait(BEAT):
                channel.receive(0.0)  # sees to the connection
                channel.send(SERVER, msgspec.msgpack.encode(Beat(os.getpid(), self.step())))


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
