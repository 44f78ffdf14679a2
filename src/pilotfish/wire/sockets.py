"""Channels over ZeroMQ: a pool listens with a ROUTER; a target dials each pool with a DEALER (`dialing`).

A message from a target has two parts: the target's incarnation, and the frame. One from a pool is the frame alone.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import zmq
from zmq.utils import z85

from pilotfish.core.messages import MAX_FRAME, Peer
from pilotfish.errors import ParameterError
from pilotfish.wire.channel import HIGH_WATER, Received
from pilotfish.wire.curve_keys import KEY_LENGTH, PoolKeys
from pilotfish.wire.endpoints import Endpoint, check_private, listening_endpoint

#: Messages that one socket hands over at a time.
MAX_MESSAGES = 256
#: Bytes of an incarnation.
MAX_INCARNATION = 64
#: Peers of one key that a pool can answer. Beyond them the one longest silent is forgotten.
MAX_PEERS = 1024
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
_ZAP_ADDRESS = "inproc://zeromq.zap.01"  # where ZeroMQ asks who may connect

Socket: TypeAlias = "zmq.Socket[bytes]"
#: Takes a message's parts; returns the frame if the message holds one for the channel's user.
Handler: TypeAlias = Callable[[Sequence[zmq.Frame]], Received | None]


class SocketChannel:
    """Sockets of one ZeroMQ context, waited for together, and `wake`."""

    def __init__(self, high_water: int = HIGH_WATER) -> None:
        """`high_water`: frames that may wait for a peer, and from one; more are lost. 0: no limit, none is."""
        self._high_water = high_water
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._handlers: dict[Socket, Handler] = {}
        self._woken = False
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # A number that `close` has freed may name another file. Signal handlers wake, in the midst of anything.
        self._waker_lock = threading.RLock()
        self._poller.register(self._waker, zmq.POLLIN)

    def receive(self, timeout: float) -> list[Received]:
        """As `Channel.receive`, in whole milliseconds; up to MAX_MESSAGES frames of each socket."""
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

    def _watch(self, socket: Socket, handler: Handler) -> None:
        self._poller.register(socket, zmq.POLLIN)
        self._handlers[socket] = handler

    def _poll(self, seconds: float) -> list[Received]:
        """Wait once, and handle whatever is ready."""
        frames: list[Received] = []
        for source, _ in self._poller.poll(max(0, math.ceil(seconds * 1000))):
            if source == self._waker:
                os.eventfd_read(self._waker)
                self._woken = True
            else:
                frames.extend(filter(None, map(self._handlers[source], _messages(source))))
        return frames


def _messages(socket: Socket) -> Iterator[Sequence[zmq.Frame]]:
    with suppress(zmq.Again):
        for _ in range(MAX_MESSAGES):
            yield socket.recv_multipart(zmq.NOBLOCK, copy=False)


class ListeningChannel(SocketChannel):
    """Where targets find a pool: `endpoint`, with the port that was free.

    A peer is the key that its connection proved, and the incarnation that its messages name. The way to it is the
    connection that it was last heard on, so a target that reconnects is the same peer at once. A ROUTER addresses
    connections by names, which clients may choose: a second client could choose the first one's and receive what is
    meant for it. So ROUTER_HANDOVER is off, and a peer has no name on its connection: ZeroMQ then numbers it (a zero
    and 32 bits, counted from a random start, which no client is told), and connections that are named otherwise are
    not heard. Without keys, whoever can connect can use any incarnation.

    ParameterError, field `listen`, for an address that cannot be used, and for one that other hosts reach without
    `keys`, unless `insecure`. With keys, a client whose key is not allowed is turned away before it is heard.
    """

    def __init__(
        self, endpoint: str, keys: PoolKeys | None = None, insecure: bool = False, high_water: int = HIGH_WATER
    ) -> None:
        where = listening_endpoint("listen", endpoint)
        check_private("listen", endpoint, where, keys is not None or insecure)
        super().__init__(high_water)
        self._path: Path | None = None  # to unlink: the socket's file, once it is there
        self._allowed = {} if keys is None else keys.allowed
        self._key_length = 0 if keys is None else KEY_LENGTH
        self._routes: dict[bytes, dict[Peer, bytes]] = {}  # by key: connections, longest silent first
        self._router = self._open(zmq.ROUTER, where, {zmq.ROUTER_MANDATORY: 1})
        try:
            if keys is not None:
                self._require_keys(keys)
            _bind(self._router, endpoint, where)
        except BaseException:
            self.close()
            raise
        self._path = where.path
        self._watch(self._router, self._received)
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def send(self, peer: Peer, frame: bytes) -> bool:
        routes = self._routes.get(peer[: self._key_length], {})
        if peer not in routes or len(frame) > MAX_FRAME:
            return False
        try:
            self._router.send_multipart((routes[peer], frame), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            del routes[peer]
            return False
        return True

    def close(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)  # first: from now on the path is free for another
            self._path = None
        super().close()

    def _require_keys(self, keys: PoolKeys) -> None:
        zap = self._context.socket(zmq.REP)
        zap.bind(_ZAP_ADDRESS)
        self._watch(zap, lambda parts: self._admit(zap, parts))
        self._router.curve_server = True  # refuses the mechanisms that know no keys
        self._router.curve_secretkey = keys.own.secret.encode()
        self._router.zap_domain = b"pilotfish"  # with a domain, no answer is a refusal

    def _admit(self, zap: Socket, parts: Sequence[zmq.Frame]) -> None:
        """Answer who may connect (ZAP, ZeroMQ RFC 27): allowed keys, whose text becomes the User-Id of all frames."""
        version, request, _domain, _address, _name, mechanism, *credentials = (part.bytes for part in parts)
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" else b""
        allowed = key.decode() in self._allowed
        zap.send_multipart([version, request, *([b"200", b"", key] if allowed else [b"400", b"", b""]), b""])

    def _received(self, parts: Sequence[zmq.Frame]) -> Received | None:
        """None for what is not a message of two parts on a connection that ZeroMQ has numbered."""
        if len(parts) != 3:
            return None
        route, incarnation, frame = (part.bytes for part in parts)
        if len(route) != 5 or route[0] or not 1 <= len(incarnation) <= MAX_INCARNATION:
            return None
        if not self._key_length:
            return Received(self._learn(b"", incarnation, route), frame)
        key = str(parts[1].get("User-Id"))
        client = self._allowed[key]
        return Received(self._learn(key.encode(), incarnation, route), frame, client.tenant, client.weight)

    def _learn(self, key: bytes, incarnation: bytes, route: bytes) -> Peer:
        peer = key + incarnation
        routes = self._routes.setdefault(key, {})
        routes.pop(peer, None)
        routes[peer] = route
        if len(routes) > MAX_PEERS:
            del routes[next(iter(routes))]
        return peer


def _bind(router: Socket, endpoint: str, where: Endpoint) -> None:
    mask = os.umask(0o177)  # a Unix socket is made with mode 0600; there is no moment at which others could connect
    try:
        router.bind(where.url)
    except zmq.ZMQError as error:
        allowed = f"an address that can be listened at ({zmq.strerror(error.errno or 0)})"
        raise ParameterError("listen", endpoint, allowed) from error
    finally:
        os.umask(mask)
