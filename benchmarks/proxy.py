"""A TCP proxy that stands for a network: it delays what passes by half a round trip, and limits its rate.

    target ◄─────────► proxy ◄─────────► pool
              ─ reader ─ queue ─ writer ─►        a thread each, in both directions

`python benchmarks/proxy.py HOST:PORT MBIT MS` listens at a port, with a round trip of so many milliseconds, prints
its endpoint as JSON on the first line of stdout, and runs until it is killed.
"""

import json
import queue
import socket
import socketserver
import sys
import threading
import time
from contextlib import suppress
from typing import Any, TypeAlias

from pilotfish.engine.processes.process import die_with_parent, name_process

HOST = "127.0.0.1"
#: Bytes that are taken at a time.
CHUNK = 4096
#: Seconds of its rate that wait before a link; then the sender has to wait.
BUFFER = 0.05

#: Bytes, none where the sender has ended, and when they are due.
UnderWay: TypeAlias = "queue.SimpleQueue[tuple[float, bytes]]"


class Link:
    """A direction: bytes leave one after another at the rate, and arrive `delay` seconds later, in order."""

    def __init__(self, delay: float, mbit: float) -> None:
        """`mbit` is in Mbit/s."""
        self._delay = delay
        self._bytes_per_second = mbit * 1e6 / 8
        self._free_at = float("-inf")  # when the last byte so far has left

    def due(self, now: float, size: int) -> float:
        """When the last of `size` bytes arrives that come to the link at `now`."""
        self._free_at = max(now, self._free_at) + size / self._bytes_per_second
        return self._free_at + self._delay

    def excess(self, now: float) -> float:
        """Seconds for which the sender has to wait until what it has sent fits into the buffer."""
        return max(self._free_at - now - BUFFER, 0.0)


class Proxy(socketserver.ThreadingTCPServer):
    """Passes on every connection to an address. A connection has both links to itself."""

    daemon_threads = True

    def __init__(self, to: tuple[str, int], round_trip: float, mbit: float) -> None:
        """`round_trip` is in seconds."""
        super().__init__((HOST, 0), socketserver.BaseRequestHandler)
        self._to, self._half, self._mbit = to, round_trip / 2, mbit

    @property
    def port(self) -> int:
        _, port = self.socket.getsockname()
        return int(port)

    def finish_request(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Called in a thread of the connection `request`, which is closed afterwards."""
        with suppress(OSError), socket.create_connection(self._to) as far:
            back = threading.Thread(target=carry, args=(far, request, Link(self._half, self._mbit)), daemon=True)
            back.start()
            carry(request, far, Link(self._half, self._mbit))
            back.join()


def carry(source: socket.socket, sink: socket.socket, link: Link) -> None:
    """Passes all that comes from `source`, and its end, to `sink`."""
    under_way: UnderWay = queue.SimpleQueue()
    sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    writer = threading.Thread(target=_write, args=(under_way, source, sink), daemon=True)
    writer.start()
    with suppress(OSError):  # it has ended, however
        while data := source.recv(CHUNK):
            now = time.perf_counter()
            under_way.put((link.due(now, len(data)), data))
            if excess := link.excess(now):
                time.sleep(excess)
    under_way.put((link.due(time.perf_counter(), 0), b""))
    writer.join()


def _write(under_way: UnderWay, source: socket.socket, sink: socket.socket) -> None:
    """Writes each chunk when it is due. Where `sink` takes no more, `source` is shut down."""
    try:
        while True:
            due, data = under_way.get()
            time.sleep(max(due - time.perf_counter(), 0.0))
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            sink.sendall(data)
    except OSError:
        with suppress(OSError):
            source.shutdown(socket.SHUT_RDWR)


def main() -> None:
    name_process("proxy")
    die_with_parent()
    to, mbit, milliseconds = sys.argv[1:]
    host, _, port = to.rpartition(":")
    with Proxy((host, int(port)), float(milliseconds) / 1000, float(mbit)) as proxy:
        sys.stdout.write(json.dumps({"endpoint": f"tcp://{HOST}:{proxy.port}"}) + "\n")
        sys.stdout.flush()
        proxy.serve_forever()


if __name__ == "__main__":
    main()
