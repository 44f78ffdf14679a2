"""A pool's end of its connections to targets: a ROUTER.

A peer is the key that its connection proved, and the incarnation that its messages name. The way to it is the
connection that it was last heard on, so a target that reconnects is the same peer at once. A ROUTER addresses
connections by names, which clients may choose: a second client could choose the first one's and receive what is meant
for it. So ROUTER_HANDOVER is off, and a peer has no name on its connection: ZeroMQ then numbers it (a zero and 32
bits, counted from a random start, which no client is told), and connections that are named otherwise are not heard.
Without keys, whoever can connect can use any incarnation.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import zmq
from zmq.utils import z85

from pilotfish.core.messages import MAX_FRAME, Peer
from pilotfish.errors import ParameterError
from pilotfish.wire.channel import HIGH_WATER, Received
from pilotfish.wire.curve_keys import KEY_LENGTH, PoolKeys
from pilotfish.wire.endpoints import Endpoint, listening_endpoint
from pilotfish.wire.sockets import MAX_FRAMES, MAX_INCARNATION, SocketChannel, check_private

#: Peers of one key that a pool can answer. Beyond them the one longest silent is forgotten.
MAX_PEERS = 1024
_ZAP_ADDRESS = "inproc://zeromq.zap.01"  # where ZeroMQ asks who may connect


class ListeningChannel(SocketChannel):
    """Where targets find a pool: `endpoint`, with the port that was free.

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
        self._watch(self._router, self._drain)
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def send(self, peer: Peer, frame: bytes) -> bool:
        routes = self._routes.get(peer[: self._key_length], {})
        if peer not in routes or len(frame) > MAX_FRAME:
            return False
        try:
            self._router.send(routes[peer], zmq.SNDMORE | zmq.NOBLOCK)
            self._router.send(frame, zmq.NOBLOCK)
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
        self._watch(zap, lambda: self._admit(zap))
        self._router.curve_server = True  # refuses the mechanisms that know no keys
        self._router.curve_secretkey = keys.own.secret.encode()
        self._router.zap_domain = b"pilotfish"  # with a domain, no answer is a refusal

    def _admit(self, zap: zmq.Socket[bytes]) -> list[Received]:
        """Answer who may connect (ZAP, ZeroMQ RFC 27): allowed keys, whose text becomes the User-Id of all frames."""
        version, request, _domain, _address, _name, mechanism, *credentials = zap.recv_multipart()
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" else b""
        allowed = key.decode() in self._allowed
        zap.send_multipart([version, request, *([b"200", b"", key] if allowed else [b"400", b"", b""]), b""])
        return []

    def _drain(self) -> list[Received]:
        frames: list[Received] = []
        with suppress(zmq.Again):
            for _ in range(MAX_FRAMES):
                received = self._received(self._router.recv_multipart(zmq.NOBLOCK, copy=False))
                if received is not None:
                    frames.append(received)
        return frames

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


def _bind(router: zmq.Socket[bytes], endpoint: str, where: Endpoint) -> None:
    mask = os.umask(0o177)  # a Unix socket is made with mode 0600; there is no moment at which others could connect
    try:
        router.bind(where.url)
    except zmq.ZMQError as error:
        allowed = f"an address that can be listened at ({zmq.strerror(error.errno or 0)})"
        raise ParameterError("listen", endpoint, allowed) from error
    finally:
        os.umask(mask)
