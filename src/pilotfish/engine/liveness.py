"""Liveness of a target, in seconds: its heartbeat, how long it has been silent, how long it takes to start."""

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
#: Longest time between two looks that counts as silence. A later look means that this process, or the whole machine,
#: stood still itself.
LONGEST_LOOK = 0.5


class Heartbeat:
    """A thread that sends a Beat every BEAT seconds until `close`, over a connection of its own. A forward lets other
    threads run, so silence means that the process stands still. A long step shows in the Beat itself."""

    def __init__(self, endpoint: str) -> None:
        self.step: Callable[[], float] = lambda: 0.0  # seconds that the present step has lasted
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
                channel.receive(0.0)  # keeps the connection alive
                channel.send(SERVER, msgspec.msgpack.encode(Beat(os.getpid(), self.step())))


class Silence:
    """Seconds since a process was last heard, not counting time in which this process stood still."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._looked: float | None = None

    def heard(self) -> None:
        self.seconds = 0.0

    def look(self, now: float) -> float:
        if self._looked is not None:
            self.seconds += min(now - self._looked, LONGEST_LOOK)
        self._looked = now
        return self.seconds


class StartTime:
    """Seconds that a target takes from its process's start until it is ready."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._last: float | None = None  # duration of the last start

    def begin(self, now: float) -> None:
        self._began = now

    def end(self, now: float) -> None:
        self._last = now - self._began

    def left(self, now: float) -> float:
        """Estimated seconds until it is ready: as long as the last start; in the first, as long again as so far."""
        passed = now - self._began
        return passed if self._last is None else max(self._last - passed, 0.0)
