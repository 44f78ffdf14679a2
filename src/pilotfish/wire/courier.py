"""The thread that owns a channel: it hands over what comes in, and sends what others post."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from pilotfish.wire.channel import Channel, Peer, Received

logger = logging.getLogger(__name__)


class Courier:
    """Frames arrive and leave while the owner's own thread computes."""

    def __init__(
        self, channel: Channel, handle: Callable[[Received], None], tick: Callable[[], None], period: float = 0.1
    ) -> None:
        """On its thread: `handle` is called with every frame, `tick` about every `period` seconds or more often."""
        self._channel = channel
        self._handle = handle
        self._tick = tick
        self._period = period
        self._outbox: deque[tuple[Peer, bytes]] = deque()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, peer: Peer, frame: bytes) -> None:
        """Send soon, in order; from any thread. It may be lost."""
        self._outbox.append((peer, frame))
        self._channel.wake()

    def close(self) -> None:
        """Send what was posted, then end. Idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            if self._thread.ident is not None:
                self._channel.wake()
                self._thread.join()
            self._channel.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._safely(self._tick)
            for received in self._channel.receive(self._period):
                self._send_posted()
                self._safely(lambda received=received: self._handle(received))  # type: ignore[misc]
            self._send_posted()
        self._send_posted()

    def _send_posted(self) -> None:
        while self._outbox:
            self._channel.send(*self._outbox.popleft())

    @staticmethod
    def _safely(call: Callable[[], None]) -> None:
        """A frame that breaks its handler must not end the thread for all others."""
        try:
            call()
        except Exception:
            logger.exception("a frame could not be handled")
