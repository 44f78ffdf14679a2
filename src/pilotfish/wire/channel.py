"""Frames (messages as MessagePack maps with a `type`) and channels for them. Delivery may fail; order holds."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from pilotfish.core.messages import MAX_FRAME, Peer, ToDraft, ToTarget, Tree
from pilotfish.errors import WireError

logger = logging.getLogger(__name__)

#: Frames that wait for a peer which does not take them. More are lost, which both sides notice and mend.
HIGH_WATER = 1024

Message = TypeVar("Message")
_to_draft: msgspec.msgpack.Decoder[ToDraft] = msgspec.msgpack.Decoder(ToDraft)
_to_target: msgspec.msgpack.Decoder[ToTarget] = msgspec.msgpack.Decoder(ToTarget)
encode = msgspec.msgpack.Encoder().encode


def decode_to_draft(frame: bytes) -> ToDraft:
    return decoded(_to_draft, frame)


def decode_to_target(frame: bytes) -> ToTarget:
    """WireError also for a Tree whose lists differ in length."""
    message = decoded(_to_target, frame)
    if (
        isinstance(message, Tree)
        and len({len(x) for x in (message.ids, message.parents, message.tokens, message.scores)}) > 1
    ):
        raise WireError("tree: ids, parents, tokens and scores differ in length")
    return message


def decoded(decoder: msgspec.msgpack.Decoder[Message], frame: bytes) -> Message:
    """WireError for what the decoder does not know."""
    if len(frame) > MAX_FRAME:
        raise WireError(f"frame: {len(frame)} bytes; at most {MAX_FRAME} are allowed")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"frame: {error}") from error


@dataclass(frozen=True)
class Received:
    """A frame and who sent it."""

    peer: Peer
    frame: bytes
    tenant: str = ""  # to whom the peer's key belongs; "" without keys
    weight: float = 1.0  # which share of a saturated draft the tenant has


class Channel(Protocol):
    """Used by one thread at a time; only `wake` may be called from any."""

    def send(self, peer: Peer, frame: bytes) -> bool:
        """Never blocks; False where the frame is lost: nobody is there, or too many are waiting."""

    def receive(self, timeout: float) -> list[Received]:
        """Frames that have come; waits for them up to `timeout` seconds, or until `wake`."""

    def wake(self) -> None:
        """Have the thread that waits in `receive` return."""

    def close(self) -> None:
        """Free sockets and files. What was sent just before may still go out, for 100 ms at most."""


class ChannelThread:
    """The thread that owns a channel: hands over the frames that arrive, and sends those that others post."""

    def __init__(self, channel: Channel, period: float = 0.1) -> None:
        self._channel = channel
        self._period = period
        self._outbox: deque[tuple[Peer, bytes]] = deque()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, handle: Callable[[Received], None], tick: Callable[[], None]) -> None:
        """On the thread `handle` is called with every frame, `tick` every `period` seconds."""
        self._thread = threading.Thread(target=self._run, args=(handle, tick), name="channel", daemon=True)
        self._thread.start()

    def post(self, peer: Peer, frame: bytes) -> None:
        """Send soon, in order; from any thread. It may be lost."""
        self._outbox.append((peer, frame))
        self._channel.wake()

    def close(self) -> None:
        """Send what was posted, then end. Idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            if self._thread is not None:
                self._channel.wake()
                self._thread.join()
            self._channel.close()

    def _run(self, handle: Callable[[Received], None], tick: Callable[[], None]) -> None:
        due = time.monotonic()
        while not self._closing.is_set():
            if time.monotonic() >= due:
                due = time.monotonic() + self._period
                _safely(tick)
            for received in self._channel.receive(due - time.monotonic()):
                self._send_posted()
                _safely(handle, received)
            self._send_posted()
        self._send_posted()

    def _send_posted(self) -> None:
        while self._outbox:
            self._channel.send(*self._outbox.popleft())


def _safely(call: Callable[..., None], *arguments: Received) -> None:
    """A frame that breaks its handler must not end the thread for all others."""
    try:
        call(*arguments)
    except Exception:
        logger.exception("a frame could not be handled")
