"""A target's sign of life, while a step runs too."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from contextlib import closing

import msgspec

from pilotfish.wire.dialing import DialingChannel
from pilotfish.wire.serving import Beat

#: Seconds between two beats.
BEAT = 0.5
_SERVER = b"0"


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
                channel.send(_SERVER, msgspec.msgpack.encode(Beat(os.getpid(), self.step())))
