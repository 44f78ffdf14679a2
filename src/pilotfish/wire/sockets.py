"""The common part of channels over ZeroMQ: a pool listens (`listening`), targets dial (`dialing`).

A message from a target has two parts: the target's incarnation, and the frame. One from a pool is the frame alone.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

import zmq

from pilotfish.core.messages import MAX_FRAME
from pilotfish.errors import ParameterError
from pilotfish.wire.channel import HIGH_WATER, Received
from pilotfish.wire.endpoints import Endpoint

#: Frames that one socket hands over at a time.
MAX_FRAMES = 256
#: Bytes of an incarnation.
MAX_INCARNATION = 64
LINGER_MS = 100
_OPTIONS = {
    zmq.LINGER: LINGER_MS,
    zmq.MAXMSGSIZE: MAX_FRAME + 64,  # encryption adds 33
    zmq.HANDSHAKE_IVL: 10_000,
    zmq.TCP_KEEPALIVE: 1,
}
#: Within a host the system tells of a process that has ended. One that is stopped goes on where it was: a heartbeat
#: would take its connection, and what is on the way.
_BETWEEN_HOSTS = {
    zmq.HEARTBEAT_IVL: 2_000,  # ms; answered by ZeroMQ's own thread, also while a forward runs
    zmq.HEARTBEAT_TIMEOUT: 10_000,
}

Socket: TypeAlias = "zmq.Socket[bytes]"
#: What to do when a socket has something; the frames in it.
Handler: TypeAlias = Callable[[], list[Received]]


class SocketChannel:
    """Sockets of one ZeroMQ context, waited for together, and `wake`."""

    def __init__(self, high_water: int = HIGH_WATER) -> None:
        """`high_water`: frames that may wait for a peer, and from one; more are lost. 0: no limit, none is."""
        self._high_water = high_water
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._handlers: dict[Socket | int, Handler] = {}
        self._woken = False
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # A number that `close` has freed may name another file. Signal handlers wake, in the midst of anything.
        self._waker_lock = threading.RLock()
        self._watch(self._waker, self._on_wake)

    def receive(self, timeout: float) -> list[Received]:
        """As `Channel.receive`, in whole milliseconds; up to MAX_FRAMES frames of each socket."""
        deadline = time.monotonic() + timeout
        self._woken = False
        while True:
            frames = self._poll(deadline - time.monotonic())
            if frames or self._woken or time.monotonic() >= deadline:
                return frames

    def wake(self) -> None:
        with self._waker_lock:
            if self._waker >= 0:
                os.eventfd_write(self._waker, 1)

    def close(self) -> None:
        with self._waker_lock:
            waker, self._waker = self._waker, -1
        if waker >= 0:
            self._context.destroy(LINGER_MS)
            os.close(waker)

    def _open(self, kind: int, where: Endpoint, options: Mapping[zmq.SocketOption, int]) -> Socket:
        socket = self._context.socket(kind)
        between = _BETWEEN_HOSTS if where.path is None else {}
        for option, value in {**_OPTIONS, zmq.IPV6: where.ipv6, **between, **options}.items():
            socket.setsockopt(option, value)
        socket.set_hwm(self._high_water)
        return socket

    def _watch(self, source: Socket | int, handler: Handler) -> None:
        self._poller.register(source, zmq.POLLIN)
        self._handlers[source] = handler

    def _poll(self, seconds: float) -> list[Received]:
        """Wait once, and handle whatever is ready."""
        ready = self._poller.poll(max(0, math.ceil(seconds * 1000)))
        return [received for source, _ in ready for received in self._handlers[source]()]

    def _on_wake(self) -> list[Received]:
        os.eventfd_read(self._waker)
        self._woken = True
        return []


def check_private(field: str, text: str, endpoint: Endpoint, allowed: bool) -> None:
    """ParameterError where frames would leave this host in the clear, unless that is `allowed`."""
    if not (endpoint.private or allowed):
        options = "--key and --allow" if field == "listen" else "--draft-key and --draft-pool-key"
        raise ParameterError(field, text, f"an address of this host alone, keys ({options}), or --insecure")
