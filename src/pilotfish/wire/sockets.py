"""Channels over ZeroMQ: pools listen with a ROUTER, targets dial each with a DEALER; likewise targets listen to
servers. A dialer's message is its incarnation and the frame; a listener's is the frame alone."""

import math
import os
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import zmq
from zmq.utils import z85

from pilotfish.core.peers.fields import MAX_FRAME, Peer
from pilotfish.errors import ParameterError
from pilotfish.wire.channel import HIGH_WATER, LARGE, MAX_FRAMES, Channel, Received, Socket
from pilotfish.wire.curve_keys import KEY_LENGTH, PoolKeys, TargetKeys
from pilotfish.wire.endpoints import Endpoint, check_private, dialled_endpoint, listening_endpoint

#: Bytes of an incarnation.
MAX_INCARNATION = 64
#: Peers of one key that a pool can answer. Beyond them the one longest silent is forgotten.
MAX_PEERS = 1024
_ZAP_ADDRESS = "inproc://zeromq.zap.01"  # where ZeroMQ asks who may connect
#: Seconds until a pool is dialled again that hung up, and one that refused.
REDIAL_LOST, REDIAL_REFUSED = 0.05, 2.0
_DIALING = {
    zmq.IMMEDIATE: 1,  # while nobody is connected a frame is lost; later it would mean nothing
    zmq.RECONNECT_IVL: 50,
    zmq.CONNECT_TIMEOUT: 2_000,
}
_REFUSALS = zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
_WATCHED = _REFUSALS | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | zmq.Event.CLOSED


class ListeningChannel(Channel):
    """Targets find a pool here: `endpoint`, with the port that was free.

    A peer is the key that its connection proved and the incarnation that its messages name; answers go to the
    connection that it was last heard on, so a target that reconnects is the same peer at once. ROUTER addresses
    connections by names that clients may choose, so one could take another's and receive its messages. So
    ROUTER_HANDOVER is off, and only connections that ZeroMQ numbered itself (a zero and 32 bits, from a random start)
    are heard. Without keys any client can use any incarnation; with keys only allowed keys are let in.

    ParameterError, field `listen`, for an unusable address, or without `keys` one that others reach, unless `insecure`.
    """

    def __init__(
        self, endpoint: str, keys: PoolKeys | None = None, insecure: bool = False, high_water: int = HIGH_WATER
    ) -> None:
        where = listening_endpoint("listen", endpoint)
        check_private("listen", endpoint, where, keys is not None or insecure)
        super().__init__(high_water)
        self._path: Path | None = None  # to unlink: the socket's file
        self._allowed = {} if keys is None else keys.allowed
        self._key_length = 0 if keys is None else KEY_LENGTH
        self._routes: dict[bytes, dict[Peer, bytes]] = {}  # by key: connections, longest silent first
        self._router = self._open(zmq.ROUTER, where, {zmq.ROUTER_MANDATORY: 1})
        try:
            if keys is not None:
                self._require_keys(keys)
            self._bind(endpoint, where)
            self._watch(self._router, self._received)
            self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        except BaseException:  # a signal that ends the process among them: the socket's file must not stay
            self.close()
            raise

    def _bind(self, endpoint: str, where: Endpoint) -> None:
        mask = os.umask(0o177)  # a Unix socket is made with mode 0600; there is no moment at which others could connect
        self._path = where.path  # before the file is there: a signal may come as soon as it is
        try:
            self._router.bind(where.url)
        except zmq.ZMQError as error:
            self._path = None
            allowed = f"an address that can be listened at ({zmq.strerror(error.errno or 0)})"
            raise ParameterError("listen", endpoint, allowed) from error
        finally:
            os.umask(mask)

    def _send(self, peer: Peer, frames: Sequence[bytes]) -> bool:
        routes = self._routes.get(peer[: self._key_length], {})
        if peer not in routes or not _fit(frames):
            return False
        small = max(map(len, frames), default=0) < LARGE
        try:
            self._router.send_multipart((routes[peer], *frames), zmq.NOBLOCK, copy=small)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            del routes[peer]
            return False
        finally:
            self._sent(self._router)
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

    def _admit(self, zap: Socket, parts: Sequence[zmq.Frame]) -> list[Received]:
        """ZAP (ZeroMQ RFC 27): the text of an allowed key becomes the User-Id of all frames."""
        version, request, _domain, _address, _name, mechanism, *credentials = (part.bytes for part in parts)
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" else b""
        allowed = key.decode() in self._allowed
        zap.send_multipart([version, request, *([b"200", b"", key] if allowed else [b"400", b"", b""]), b""])
        return []

    def _received(self, parts: Sequence[zmq.Frame]) -> list[Received]:
        """Only frames after an incarnation, on a connection that ZeroMQ has numbered."""
        if not 3 <= len(parts) <= MAX_FRAMES + 2:
            return []
        route, incarnation, *frames = (part.bytes for part in parts)
        if len(route) != 5 or route[0] or not 1 <= len(incarnation) <= MAX_INCARNATION:
            return []
        if not self._key_length:
            peer = self._learn(b"", incarnation, route)
            return [Received(peer, frame) for frame in frames]
        key = str(parts[1].get("User-Id"))
        client, peer = self._allowed[key], self._learn(key.encode(), incarnation, route)
        return [Received(peer, frame, client.tenant, client.weight) for frame in frames]

    def _learn(self, key: bytes, incarnation: bytes, route: bytes) -> Peer:
        peer = key + incarnation
        routes = self._routes.setdefault(key, {})
        routes.pop(peer, None)
        routes[peer] = route
        if len(routes) > MAX_PEERS:
            del routes[next(iter(routes))]
        return peer


def _fit(frames: Sequence[bytes]) -> bool:
    return len(frames) <= MAX_FRAMES and all(len(frame) <= MAX_FRAME for frame in frames)


class DialingChannel(Channel):
    """Dials all `endpoints`, and those added later, again and again. The i-th pool's peer is str(i).encode(), for
    good. Pools know this target by `incarnation`, random bytes; one dialled after `hang_up` by another. `role` is
    for messages. ParameterError, field `draft_pool` or that of another role, for an unusable address, and without
    keys for one on another host, unless `insecure`."""

    def __init__(
        self,
        endpoints: Sequence[str],
        incarnation: bytes,
        keys: Sequence[TargetKeys | None] = (),
        insecure: bool = False,
        high_water: int = HIGH_WATER,
        role: str = "draft",
    ) -> None:
        if not 1 <= len(incarnation) <= MAX_INCARNATION:
            raise ParameterError("incarnation", incarnation, f"1 to {MAX_INCARNATION} bytes")
        self.role, self._insecure = role, insecure
        pools = list(zip(endpoints, keys or [None] * len(endpoints), strict=True))
        where = [self.checked(endpoint, own) for endpoint, own in pools]
        super().__init__(high_water)
        self._incarnation = incarnation
        self._connections: dict[Peer, _Connection] = {}
        self._hung_up: set[_Connection] = set()  # that are to be dialled again
        self._dialled: list[str] = []  # URLs
        for endpoint, (_, own) in zip(where, pools, strict=True):
            self.dial(endpoint, own)

    def checked(self, endpoint: str, keys: TargetKeys | None) -> Endpoint:
        """For `dial`; ParameterError as above. From any thread: looking up a host's name may take seconds."""
        field = f"{self.role}_pool"
        where = dialled_endpoint(field, endpoint)
        check_private(field, endpoint, where, keys is not None or self._insecure)
        return where

    def dial(self, endpoint: Endpoint, keys: TargetKeys | None) -> Peer:
        with self._lock:
            peer, socket = str(len(self._dialled)).encode(), self._open(zmq.DEALER, endpoint, _DIALING)
            connection = self._connections[peer] = _Connection(peer, socket, endpoint.url, keys, self.role)
            connection.incarnation = self._incarnation + (peer if endpoint.url in self._dialled else b"")
            self._watch(socket, connection.received)  # before its events: none is lost
            self._watch(connection.events, partial(self._observe, connection))
            self._dialled.append(endpoint.url)
        return peer

    def hang_up(self, peer: Peer) -> None:
        """Ignore it from now on. Frames sent just before may still go out."""
        with self._lock:
            connection = self._connections.pop(peer)
            self._unwatch(connection.events)
            self._unwatch(connection.socket)
            self._hung_up.discard(connection)
            connection.close()

    def _send(self, peer: Peer, frames: Sequence[bytes]) -> bool:
        connection = self._connections.get(peer)
        if connection is None or not _fit(frames):
            return False
        try:
            connection.socket.send_multipart((connection.incarnation, *frames), zmq.NOBLOCK)
        except zmq.Again:
            return False
        finally:
            self._sent(connection.socket)
        return True

    def problem(self, peer: Peer) -> str | None:
        """Any thread may ask."""
        connection = self._connections.get(peer)
        return f"{self.role}_pool: it is not dialled any more" if connection is None else connection.problem

    def refused(self, peer: Peer) -> bool:
        """Whether that end refuses this target's keys, or has none that it may take."""
        connection = self._connections.get(peer)
        return connection is not None and connection.refused

    def _observe(self, connection: "_Connection", parts: Sequence[zmq.Frame]) -> list[Received]:
        connection.observe(parts)
        if connection.redial_at < math.inf:
            self._hung_up.add(connection)
        return []

    def _poll(self, seconds: float) -> list[Received]:
        with self._lock:
            due = min((connection.redial_at for connection in self._hung_up), default=math.inf)
        frames = super()._poll(min(seconds, due - time.monotonic()))
        if due <= time.monotonic():
            with self._lock:
                self._hung_up = {connection for connection in self._hung_up if not connection.redial_if_due()}
        return frames


class _Connection:
    """ZeroMQ redials while nobody answers, but gives up after a refused key or a bad frame, and redials at once
    after a handshake that broke off: in both cases this hangs up and redials itself."""

    def __init__(self, peer: Peer, socket: Socket, endpoint: str, keys: TargetKeys | None, role: str) -> None:
        self.socket = socket
        self._peer, self._endpoint, self._keys, self._role = peer, endpoint, keys, role
        self.problem: str | None = f"{role}_pool: {endpoint} has not answered yet"
        self.refused = False
        self.incarnation = b""  # by which the pool knows this target
        self.redial_at = math.inf
        if keys is not None:
            socket.curve_serverkey = keys.pool.encode()
            socket.curve_publickey = keys.own.public.encode()
            socket.curve_secretkey = keys.own.secret.encode()
        self.events = socket.get_monitor_socket(_WATCHED)
        socket.connect(endpoint)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.events.close()
        self.socket.close()

    def received(self, parts: Sequence[zmq.Frame]) -> list[Received]:
        """Drops a message of more frames than pools send."""
        if len(parts) > MAX_FRAMES:
            return []
        return [Received(self._peer, part.bytes if len(part) < LARGE else part.buffer) for part in parts]

    def observe(self, parts: Sequence[zmq.Frame]) -> None:
        number, _value = struct.unpack("=Hi", parts[0].bytes)
        if self.redial_at < math.inf:
            return
        event = zmq.Event(number)
        self.refused = event in _REFUSALS
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self.problem = None
        elif event == zmq.Event.CLOSED:
            self.problem = f"{self._role}_pool: nobody answers at {self._endpoint}"
        elif event == zmq.Event.DISCONNECTED:
            self._hang_up(f"{self._role}_pool: {self._endpoint} hung up", REDIAL_LOST)
        else:
            self._hang_up(f"{self._role}_pool: {self._endpoint} {self._refusal(event)}", REDIAL_REFUSED)

    def redial_if_due(self) -> bool:
        if due := self.redial_at <= time.monotonic():
            self.redial_at = math.inf
            self.socket.connect(self._endpoint)
        return due

    def _hang_up(self, problem: str, seconds: float) -> None:
        self.problem, self.redial_at = problem, time.monotonic() + seconds
        with suppress(zmq.ZMQError):  # ZeroMQ may have given up first
            self.socket.disconnect(self._endpoint)

    def _refusal(self, event: zmq.Event) -> str:
        if self._keys is None:
            return f"broke off: it wants a key, or is no {self._role} pool"
        if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            return f"refused the key {self._keys.own.public}; expected one on its allowlist"
        return f"broke off: its public key is not {self._keys.pool}, or it has none, or is no {self._role} pool"
