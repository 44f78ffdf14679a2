"""A channel within one process."""

from __future__ import annotations

import threading
import time
from collections import deque

from pilotfish.core.peers.fields import Peer
from pilotfish.wire.channel import HIGH_WATER, Received


class Loopback:
    """Both ends of a connection within one process.

    >>> target, draft = Loopback.pair(b"target")
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._other = self
        self._frames: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._woken = False

    @classmethod
    def pair(cls, target: Peer, pool: Peer = b"0") -> tuple[Loopback, Loopback]:
        """The target's end, which knows its peer as `pool`, and the draft's, which knows its peer as `target`."""
        ends = cls(pool), cls(target)
        ends[0]._other, ends[1]._other = ends[1], ends[0]
        return ends

    def send(self, peer: Peer, *frames: bytes) -> bool:
        other = self._other
        with other._changed:
            taken = peer == self._peer and len(other._frames) < HIGH_WATER
            if taken:
                other._frames.extend(frames)
                other._changed.notify()
        return taken

    def receive(self, timeout: float) -> list[Received]:
        deadline = time.monotonic() + timeout
        with self._changed:
            while not (self._frames or self._woken) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            frames, self._woken = list(self._frames), False
            self._frames.clear()
        return [Received(self._peer, frame) for frame in frames]

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify()

    def close(self) -> None:
        """Nothing is held."""
