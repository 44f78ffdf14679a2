"""A TCP proxy that stands for a network: it delays what passes by half a round trip, and limits its rate.

    target ◄─────────► proxy ◄─────────► pool
              ─ reader ─ queue ─ writer ─►        a thread each, in both directions

`python -m pilotfish.bench.proxy HOST:PORT MBIT MS [MS …]` listens at one port for each round trip of so many
milliseconds, prints the ports as JSON on the first line of stdout, and runs until it is killed.
"""

from __future__ import annotations

import json
import queue
import signal
import socket
import sys
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass

from pilotfish.engine.process import die_with_parent, name_process

HOST = "127.0.0.1"
#: Bytes that are taken at a time.
CHUNK = 4096
#: Seconds of its rate that wait before a link; then the sender has to wait.
BUFFER = 0.05


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


@dataclass(frozen=True)
class DelayedChunk:
    """Bytes under way; none: the sender has ended."""

    due: float
    data: bytes


class Proxy:
    """Passes on every connection to `port` of this host. A connection has both links to itself."""

    def __init__(self, to: tuple[str, int], round_trip: float, mbit: float) -> None:
        """`round_trip` is in seconds."""
        self._to = to
        self._half = round_trip / 2
        self._mbit = mbit
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def close(self) -> None:
        """Take no more connections; those that there are go on."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for one
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._pass_on, args=(near,), name="connection", daemon=True).start()

    def _pass_on(self, near: socket.socket) -> None:
        with closing(near), suppress(OSError), socket.create_connection(self._to) as far:
            back = threading.Thread(target=carry, args=(far, near, self._link()), daemon=True)
            back.start()
            carry(near, far, self._link())
            back.join()

    def _link(self) -> Link:
        return Link(self._half, self._mbit)


def carry(source: socket.socket, sink: socket.socket, link: Link) -> None:
    """Passes all that comes from `source`, and its end, to `sink`."""
    under_way: queue.SimpleQueue[DelayedChunk] = queue.SimpleQueue()
    sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    writer = threading.Thread(target=_write, args=(under_way, source, sink), daemon=True)
    writer.start()
    while data := _received(source):
        now = time.perf_counter()
        under_way.put(DelayedChunk(link.due(now, len(data)), data))
        if excess := link.excess(now):
            time.sleep(excess)
    under_way.put(DelayedChunk(link.due(time.perf_counter(), 0), b""))
    writer.join()


def _received(source: socket.socket) -> bytes:
    """The next bytes; none once it has ended, however."""
    try:
        return source.recv(CHUNK)
    except OSError:
        return b""


def _write(under_way: queue.SimpleQueue[DelayedChunk], source: socket.socket, sink: socket.socket) -> None:
    """Writes each chunk when it is due. Where `sink` takes no more, `source` is shut down."""
    try:
        while True:
            chunk = under_way.get()
            time.sleep(max(chunk.due - time.perf_counter(), 0.0))
            if not chunk.data:
                sink.shutdown(socket.SHUT_WR)
                return
            sink.sendall(chunk.data)
    except OSError:
        with suppress(OSError):
            source.shutdown(socket.SHUT_RDWR)


def main() -> None:
    name_process("proxy")
    die_with_parent()
    to, mbit, *round_trips = sys.argv[1:]
    host, _, port = to.rpartition(":")
    proxies = [Proxy((host, int(port)), float(milliseconds) / 1000, float(mbit)) for milliseconds in round_trips]
    sys.stdout.write(json.dumps({"ports": [proxy.port for proxy in proxies]}) + "\n")
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    main()
