"""A target's end of its connections to pools: a DEALER for each."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

import zmq

from pilotfish.core.messages import MAX_FRAME, Peer
from pilotfish.errors import ParameterError
from pilotfish.wire.channel import HIGH_WATER, Received
from pilotfish.wire.curve_keys import TargetKeys
from pilotfish.wire.endpoints import check_private, dialled_endpoint
from pilotfish.wire.sockets import MAX_INCARNATION, Socket, SocketChannel

#: Seconds until a pool is dialled again that hung up, and one that refused.
REDIAL_LOST, REDIAL_REFUSED = 0.05, 2.0
_OPTIONS = {
    zmq.IMMEDIATE: 1,  # while nobody is connected a frame is lost; later it would mean nothing
    zmq.RECONNECT_IVL: 50,
    zmq.RECONNECT_IVL_MAX: 2_000,
    zmq.CONNECT_TIMEOUT: 2_000,
}
_Event = zmq.Event
_WATCHED = (
    _Event.HANDSHAKE_FAILED_AUTH
    | _Event.HANDSHAKE_FAILED_PROTOCOL
    | _Event.HANDSHAKE_FAILED_NO_DETAIL
    | _Event.HANDSHAKE_SUCCEEDED
    | _Event.DISCONNECTED
    | _Event.CLOSED
)


class DialingChannel(SocketChannel):
    """Dials all `endpoints`, again and again. Peer of the pool with number i is str(i).encode().

    `incarnation`, random bytes, is by which pools know this target when it reconnects. `keys` are those for each pool.
    ParameterError, field `draft_pool`, for an address that cannot be used, and for one on another host without keys,
    unless `insecure`.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        incarnation: bytes,
        keys: Sequence[TargetKeys | None] = (),
        insecure: bool = False,
        high_water: int = HIGH_WATER,
    ) -> None:
        if not 1 <= len(incarnation) <= MAX_INCARNATION:
            raise ParameterError("incarnation", incarnation, f"1 to {MAX_INCARNATION} bytes")
        where = [dialled_endpoint("draft_pool", endpoint) for endpoint in endpoints]
        pools = list(zip(where, keys or [None] * len(where), strict=True))
        for endpoint, own in pools:
            check_private("draft_pool", endpoint.url, endpoint, own is not None or insecure)
        super().__init__(high_water)
        self._incarnation = incarnation
        self._connections: dict[Peer, _Connection] = {}
        for i, (endpoint, own) in enumerate(pools):
            peer, socket = str(i).encode(), self._open(zmq.DEALER, endpoint, _OPTIONS)
            connection = self._connections[peer] = _Connection(peer, socket, endpoint.url, own)
            self._watch(socket, connection.received)  # before its events: none is lost
            self._watch(connection.events, connection.observe)

    def send(self, peer: Peer, frame: bytes) -> bool:
        connection = self._connections.get(peer)
        if connection is None or len(frame) > MAX_FRAME:
            return False
        try:
            connection.socket.send_multipart((self._incarnation, frame), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def problem(self, peer: Peer) -> str | None:
        """Why a pool is not connected, in one line; None while it is. Any thread may ask."""
        return self._connections[peer].problem

    def _poll(self, seconds: float) -> list[Received]:
        due = min((connection.redial_at for connection in self._connections.values()), default=math.inf)
        frames = super()._poll(min(seconds, due - time.monotonic()))
        if due <= time.monotonic():
            for connection in self._connections.values():
                connection.redial_if_due()
        return frames


class _Connection:
    """A pool that is dialled, and what becomes of that.

    ZeroMQ dials on while nobody answers. It gives up for good after a refused key or a frame that is none, and does not
    wait at all after a handshake that broke off: there this hangs up, and dials again itself.
    """

    def __init__(self, peer: Peer, socket: Socket, endpoint: str, keys: TargetKeys | None) -> None:
        self.socket = socket
        self._peer, self._endpoint, self._keys = peer, endpoint, keys
        self.problem: str | None = f"draft_pool: {endpoint} has not answered yet"
        self.redial_at = math.inf
        if keys is not None:
            socket.curve_serverkey = keys.pool.encode()
            socket.curve_publickey = keys.own.public.encode()
            socket.curve_secretkey = keys.own.secret.encode()
        self.events = socket.get_monitor_socket(_WATCHED)
        socket.connect(endpoint)

    def received(self, parts: Sequence[zmq.Frame]) -> Received | None:
        return Received(self._peer, parts[0].bytes) if len(parts) == 1 else None

    def observe(self, parts: Sequence[zmq.Frame]) -> None:
        """Take in what has happened; while hung up, nothing that matters."""
        event, _value = struct.unpack("=Hi", parts[0].bytes)
        if self.redial_at == math.inf:
            self._on(_Event(event))

    def redial_if_due(self) -> None:
        if self.redial_at <= time.monotonic():
            self.redial_at = math.inf
            self.socket.connect(self._endpoint)

    def _on(self, event: zmq.Event) -> None:
        if event == _Event.HANDSHAKE_SUCCEEDED:
            self.problem = None
        elif event == _Event.CLOSED:
            self.problem = f"draft_pool: nobody answers at {self._endpoint}"
        elif event == _Event.DISCONNECTED:
            self._hang_up(f"draft_pool: {self._endpoint} hung up", REDIAL_LOST)
        else:
            self._hang_up(f"draft_pool: {self._endpoint} {self._refusal(event)}", REDIAL_REFUSED)

    def _hang_up(self, problem: str, seconds: float) -> None:
        self.problem, self.redial_at = problem, time.monotonic() + seconds
        with suppress(zmq.ZMQError):  # ZeroMQ may have given up first
            self.socket.disconnect(self._endpoint)

    def _refusal(self, event: zmq.Event) -> str:
        """ZeroMQ tells a key that is not allowed; what else failed depends on who was first to break off."""
        if self._keys is None:
            return "broke off: it wants a key, or is no draft pool"
        if event == _Event.HANDSHAKE_FAILED_AUTH:
            return f"refused the key {self._keys.own.public}; expected one on its allowlist"
        return f"broke off: its public key is not {self._keys.pool}, or it has none, or is no draft pool"
