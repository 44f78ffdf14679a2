"""The delaying proxy: what passes, in which order, never early."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.bench.proxy import BUFFER, HOST, Link, Proxy

#: Seconds after which a test gives up.
LIMIT = 20.0
FAST = 1e5


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 10_000)), min_size=1), st.floats(0, 1), st.floats(0.01, 100))
def test_a_link_keeps_order_delay_and_rate(arrivals: list[tuple[float, int]], delay: float, mbit: float) -> None:
    link, now, sent = Link(delay, mbit), 0.0, 0
    dues = []
    for pause, size in arrivals:
        now += pause
        sent += size
        dues.append(link.due(now, size))
        assert dues[-1] >= now + delay + size * 8 / (mbit * 1e6) - 1e-9  # its own bytes at the rate, then the way
        assert dues[-1] >= delay + arrivals[0][0] + sent * 8 / (mbit * 1e6) - 1e-6  # all bytes since the first
    assert all(a <= b for a, b in pairwise(dues))


def test_a_link_that_nothing_waits_for_adds_its_delay_alone() -> None:
    link = Link(0.025, mbit=8.0)
    assert link.due(1.0, 1000) == pytest.approx(1.0 + 0.001 + 0.025)  # 1 MB/s
    assert link.due(1.0, 1000) == pytest.approx(1.0 + 0.002 + 0.025)  # after the first
    assert link.due(3.0, 1000) == pytest.approx(3.0 + 0.001 + 0.025)  # nothing is saved up, nothing delayed twice


def test_a_sender_waits_for_a_full_buffer() -> None:
    link = Link(5.0, mbit=8.0)
    link.due(1.0, int(BUFFER * 1e6))
    assert link.excess(1.0) == pytest.approx(0.0)  # the delay is no part of it
    link.due(1.0, 2000)
    assert link.excess(1.0) == pytest.approx(0.002)


@contextmanager
def running(to: tuple[str, int], round_trip: float, mbit: float) -> Iterator[Proxy]:
    with Proxy(to, round_trip, mbit) as proxy:
        threading.Thread(target=proxy.serve_forever, args=(0.01,), daemon=True).start()
        yield proxy
        proxy.shutdown()


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends back all it gets."""
    with socket.create_server((HOST, 0)) as server:
        threading.Thread(target=_serve, args=(server,), daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def _serve(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        threading.Thread(target=_echo, args=(connection,), daemon=True).start()


def _echo(connection: socket.socket) -> None:
    with connection:
        while data := connection.recv(1 << 16):
            connection.sendall(data)


def received(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size > 0 and (part := connection.recv(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def test_bytes_come_in_order_and_not_before_a_round_trip(echo: int) -> None:
    sent = bytes(range(256)) * 400
    with running((HOST, echo), 0.05, FAST) as proxy, _dialled(proxy.port) as connection:
        for size in (1, 70_000, len(sent)):
            began = time.perf_counter()
            threading.Thread(target=connection.sendall, args=(sent[:size],), daemon=True).start()
            assert received(connection, size) == sent[:size]
            assert time.perf_counter() - began >= 0.05


def test_the_rate_counts_bytes(echo: int) -> None:
    with running((HOST, echo), 0.0, mbit=8.0) as proxy, _dialled(proxy.port) as connection:
        began = time.perf_counter()
        threading.Thread(target=connection.sendall, args=(bytes(200_000),), daemon=True).start()
        assert received(connection, 200_000) == bytes(200_000)
        assert time.perf_counter() - began >= 0.2  # at 1 MB/s


def test_the_end_of_either_side_is_that_of_the_other(echo: int) -> None:
    with running((HOST, echo), 0.02, FAST) as proxy:
        with _dialled(proxy.port) as connection:
            connection.sendall(b"last words")
            connection.shutdown(socket.SHUT_WR)
            assert received(connection, 100) == b"last words"  # then the end
        with socket.create_server((HOST, 0)) as server:
            nobody = server.getsockname()
        with running(nobody, 0.02, FAST) as gone, _dialled(gone.port) as connection:
            assert connection.recv(1) == b""  # nobody listens there


def test_as_a_program_it_says_where_it_listens(echo: int) -> None:
    command = [sys.executable, "-m", "pilotfish.bench.proxy", f"{HOST}:{echo}", "100", "2.5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        endpoint = json.loads(process.stdout.readline())["endpoint"]
        with _dialled(int(endpoint.removeprefix(f"tcp://{HOST}:"))) as connection:
            connection.sendall(b"ab")
            assert received(connection, 2) == b"ab"
        process.kill()


def _dialled(port: int) -> socket.socket:
    return socket.create_connection((HOST, port), LIMIT)
