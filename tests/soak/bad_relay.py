"""A TCP relay that stands for a network which stalls, swallows and cuts."""

from __future__ import annotations

import socket
import socketserver
import threading
from contextlib import suppress
from typing import Any

HOST = "127.0.0.1"
#: Bytes that are taken at a time.
CHUNK = 1 << 16


class BadRelay(socketserver.ThreadingTCPServer):
    """Passes on every connection to an address, as it is told. Any thread may tell it."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, to: tuple[str, int]) -> None:
        super().__init__((HOST, 0), socketserver.BaseRequestHandler)
        self.passed = 0  # bytes
        self._to = to
        self._open = set[socket.socket]()
        self._flows, self._reachable = threading.Event(), True
        self._swallowed: str | None = None  # the direction whose bytes are lost
        self._flows.set()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        _, port = self.socket.getsockname()
        return f"tcp://{HOST}:{port}"

    def stall(self) -> None:
        """Nothing passes until `heal`, and nothing is lost."""
        self._flows.clear()

    def swallow(self, direction: str) -> None:
        """What goes `there`, or comes `back`, is lost until `heal`, which hangs up: the rest would make no sense."""
        self._swallowed = direction

    def cut(self) -> None:
        """All hang up, and nobody can connect until `heal`."""
        self._reachable = False
        self._hang_up()

    def heal(self) -> None:
        swallowed, self._swallowed = self._swallowed, None
        self._reachable = True
        self._flows.set()
        if swallowed:
            self._hang_up()

    def finish_request(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Called in a thread of the connection `request`, which is closed afterwards."""
        if not self._reachable:
            return
        with suppress(OSError), socket.create_connection(self._to) as far:
            self._open |= {request, far}
            back = threading.Thread(target=self._carry, args=(far, request, "back"), daemon=True)
            back.start()
            self._carry(request, far, "there")
            back.join()
            self._open -= {request, far}

    def _carry(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):  # it has hung up
            while data := source.recv(CHUNK):
                self._flows.wait()
                if self._swallowed != direction:
                    sink.sendall(data)
                    self.passed += len(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _hang_up(self) -> None:
        for end in list(self._open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
