"""Frames (messages as MessagePack maps with a `type`) and channels for them. Delivery may fail; order holds."""

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TypeAlias, TypeVar, get_args

import msgspec
import zmq

from pilotfish.core.drafting.messages import ToDraft, ToTarget, Tree
from pilotfish.core.peers.fields import MAX_FRAME, Outgoing, Peer
from pilotfish.core.prefilling.prefill_messages import FromPrefill, ToPrefill
from pilotfish.errors import UnknownTypeError, WireError
from pilotfish.wire.endpoints import Endpoint

logger = logging.getLogger(__name__)

#: Messages that wait for a slow peer. Beyond that they are lost, which both sides notice and mend.
HIGH_WATER = 1024
#: Frames of one message: more than a target has requests, and a draft sessions.
MAX_FRAMES = 1 << 14
#: Messages that one socket hands over at a time.
MAX_MESSAGES = 256
LINGER_MS = 100
_OPTIONS = {
    zmq.LINGER: LINGER_MS,
    zmq.MAXMSGSIZE: MAX_FRAME + 64,  # encryption adds 33
    zmq.HANDSHAKE_IVL: 10_000,
}
#: Within a host the system tells of a process that has ended. Of a host that has gone it tells by itself after some ten
#: seconds without an answer. ZeroMQ's heartbeats would do so, too, but are not to be used: libzmq 4.3.5 aborts the
#: process whose peer hangs up while its messages wait to be read (`!_io_error`, once a heartbeat is due).
_BETWEEN_HOSTS = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 2,  # s
    zmq.TCP_KEEPALIVE_INTVL: 2,
    zmq.TCP_KEEPALIVE_CNT: 4,
    zmq.TCP_MAXRT: 10_000,  # ms, of data sent and not acknowledged
    zmq.RECONNECT_IVL_MAX: 2_000,  # where a dial fails the next one waits twice as long; within a host it costs nothing
}

Message = TypeVar("Message")
Result = TypeVar("Result")
Frame: TypeAlias = bytes | memoryview
_to_draft: msgspec.msgpack.Decoder[ToDraft] = msgspec.msgpack.Decoder(ToDraft)
_to_target: msgspec.msgpack.Decoder[ToTarget] = msgspec.msgpack.Decoder(ToTarget)
_to_prefill: msgspec.msgpack.Decoder[ToPrefill] = msgspec.msgpack.Decoder(ToPrefill)
_from_prefill: msgspec.msgpack.Decoder[FromPrefill] = msgspec.msgpack.Decoder(FromPrefill)
encode = msgspec.msgpack.Encoder().encode


def send_all(outbox: list[Outgoing], send: Callable[..., object]) -> None:
    """Each peer's in one call; then the outbox is empty."""
    frames: dict[Peer, list[bytes]] = {}
    for outgoing in outbox:
        frames.setdefault(outgoing.peer, []).append(encode(outgoing.message))
    for peer, own in frames.items():
        send(peer, *own)
    outbox.clear()


class Typed(msgspec.Struct):
    type: str = ""


def type_of(frame: Frame) -> str:
    """ "" where it cannot be read."""
    try:
        return msgspec.msgpack.decode(frame, type=Typed).type
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def decode_to_draft(frame: Frame) -> ToDraft:
    """UnknownTypeError for another type of message, WireError for a frame that is no message."""
    return _of_kind(_to_draft, frame)


def decode_to_target(frame: Frame) -> ToTarget:
    """As `decode_to_draft`. WireError also for a Tree whose lists differ in length."""
    message = _of_kind(_to_target, frame)
    if (
        isinstance(message, Tree)
        and len({len(x) for x in (message.ids, message.parents, message.tokens, message.scores)}) > 1
    ):
        raise WireError("tree: ids, parents, tokens and scores differ in length")
    return message


def _of_kind(decoder: msgspec.msgpack.Decoder[Message], frame: Frame) -> Message:
    try:
        return decoded(decoder, frame)
    except WireError as error:
        kind = type_of(frame) if len(frame) <= MAX_FRAME else ""
        if kind and all(kind != known.__struct_config__.tag for known in get_args(decoder.type)):
            raise UnknownTypeError(kind) from error
        raise


def decoded(decoder: msgspec.msgpack.Decoder[Message], frame: Frame) -> Message:
    """WireError for a frame that the decoder does not know."""
    if len(frame) > MAX_FRAME:
        raise WireError(f"frame: {len(frame)} bytes; at most {MAX_FRAME} are allowed")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"frame: {error}") from error


decode_to_prefill = partial(decoded, _to_prefill)
decode_from_prefill = partial(decoded, _from_prefill)


@dataclass(frozen=True)
class Received:
    peer: Peer
    frame: Frame
    tenant: str = ""  # of the peer's key; "" without keys
    weight: float = 1.0  # which share of a saturated draft the tenant has


#: Bytes from which on a frame is not copied on its way between ZeroMQ and its reader or writer.
LARGE = 1 << 16

Socket: TypeAlias = "zmq.Socket[bytes]"
#: Takes a message's parts; returns the frames in it that are for the channel's user.
Handler: TypeAlias = Callable[[Sequence[zmq.Frame]], Sequence[Received]]


class Channel:
    """Sockets of one ZeroMQ context, waited for together. One thread receives; any may `send` and `wake`.

    A ZeroMQ socket is used under the lock, which no thread holds while it waits: for that each socket has a file to
    poll. The file tells of a change only once, perhaps to a sending thread, which then tells the receiver."""

    def __init__(self, high_water: int = HIGH_WATER) -> None:
        """`high_water`: messages that may wait for a peer, and from one; more are lost. 0: no limit."""
        self._high_water = high_water
        self._context = zmq.Context()
        self._context.max_sockets = self._context.get(zmq.SOCKET_LIMIT)  # a connection that is dialled takes three
        self._lock = threading.RLock()
        self._poller = select.epoll()
        self._handlers: dict[Socket, Handler] = {}  # in the order in which they were watched
        self._files: dict[int, Socket] = {}
        self._unread: set[Socket] = set()  # with messages, though their files may not say so
        self._woken = False
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # A number that `close` has freed may name another file. Signal handlers wake, in the midst of anything.
        self._waker_lock = threading.RLock()
        self._poller.register(self._waker, select.EPOLLIN)

    def send(self, peer: Peer, *frames: bytes) -> bool:
        """Never waits long. False where the frames are lost: no peer, too many waiting, or the channel is closed."""
        with self._lock:
            return self._waker >= 0 and self._send(peer, frames)

    def _send(self, peer: Peer, frames: Sequence[bytes]) -> bool:
        raise NotImplementedError

    def receive(self, timeout: float) -> list[Received]:
        """Up to MAX_MESSAGES of each socket; waits up to `timeout` seconds, in whole milliseconds, or until `wake`."""
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
        """Frames sent just before may still go out, for 100 ms at most."""
        with self._lock, self._waker_lock:
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

    def _watch(self, socket: Socket, handler: Handler) -> None:
        self._handlers[socket] = handler
        self._files[socket.fileno()] = socket
        self._unread.add(socket)
        self._poller.register(socket.fileno(), select.EPOLLIN)

    def _unwatch(self, socket: Socket) -> None:
        self._poller.unregister(socket.fileno())
        self._unread.discard(socket)
        del self._files[socket.fileno()], self._handlers[socket]

    def _sent(self, socket: Socket) -> None:
        """This thread may have taken note of messages that another is to receive."""
        if socket not in self._unread and _readable(socket):
            self._unread.add(socket)
            self.wake()

    def _poll(self, seconds: float) -> list[Received]:
        ready = {file for file, _ in self._poller.poll(0 if self._unread else max(seconds, 0))}
        if self._waker in ready:
            os.eventfd_read(self._waker)
            self._woken = True
        frames: list[Received] = []
        with self._lock:
            due = self._unread.union(self._files[file] for file in ready if file in self._files)
            for socket in [socket for socket in self._handlers if socket in due]:
                frames.extend(chain.from_iterable(map(self._handlers[socket], self._messages(socket))))
        return frames

    def _messages(self, socket: Socket) -> Iterator[Sequence[zmq.Frame]]:
        self._unread.add(socket)
        for _ in range(MAX_MESSAGES):
            if not _readable(socket):
                self._unread.discard(socket)
                return
            yield socket.recv_multipart(zmq.NOBLOCK, copy=False)


def _readable(socket: Socket) -> bool:
    """Takes note of all that has happened."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


class ChannelThread:
    """Receives on its own thread. Others send themselves: waking it would take the interpreter from a step loop."""

    def __init__(self, channel: Channel, period: float = 0.1) -> None:
        self._channel = channel
        self._period = period
        self._calls: deque[Callable[[], None]] = deque()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, handle: Callable[[Received], None], tick: Callable[[], None]) -> None:
        """The thread calls `handle` with every frame, and `tick` every `period` seconds."""
        self._thread = threading.Thread(target=self._run, args=(handle, tick), name="channel", daemon=True)
        self._thread.start()

    def post(self, peer: Peer, *frames: bytes) -> None:
        """From any thread. Frames may be lost."""
        self._channel.send(peer, *frames)

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Have the thread call it, after earlier calls; from any other thread. No result comes after `close`."""
        future = Future[Result]()
        self._calls.append(partial(_settle, future, function))
        self._channel.wake()
        return future

    def close(self) -> None:
        """Make the calls asked for, then end. Idempotent."""
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
                self._do_calls()
                _safely(handle, received)
            self._do_calls()
        self._do_calls()

    def _do_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()


def _settle(future: Future[Result], function: Callable[[], Result]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)


def _safely(call: Callable[..., None], *arguments: Received) -> None:
    try:
        call(*arguments)
    except Exception:
        logger.exception("a frame, or what is done now and then, could not be handled")
