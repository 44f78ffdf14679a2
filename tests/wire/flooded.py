"""A process whose channel is sent more than it reads, by a peer that then hangs up. Its argument: which side it is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress

import zmq

from pilotfish.wire.channel import Channel
from pilotfish.wire.sockets import DialingChannel, ListeningChannel

MESSAGES, FRAME = 20_000, bytes(1_000)
#: Seconds, longer than from one heartbeat to the next but one.
BUSY = 5.0


def main(side: str) -> None:
    draft = side == "draft"
    with zmq.Context() as context, context.socket(zmq.DEALER if draft else zmq.ROUTER) as peer:
        peer.linger = 0
        peer.sndtimeo = 1000
        channel, send = _flooded_draft(peer) if draft else _flooded_target(peer)
        with suppress(zmq.Again):  # all buffers are full
            for _ in range(MESSAGES):
                send()
    time.sleep(BUSY)
    received = 0
    while frames := channel.receive(0.5):
        received += len(frames)
    channel.close()
    sys.stdout.write(f"survived {received}\n")


def _flooded_draft(target: zmq.Socket[bytes]) -> tuple[Channel, Callable[[], object]]:
    channel = ListeningChannel("tcp://127.0.0.1:0")
    target.connect(channel.endpoint)
    target.send_multipart([b"name", b"hello"])
    while not channel.receive(0.1):
        pass
    return channel, lambda: target.send_multipart([b"name", FRAME])


def _flooded_target(pool: zmq.Socket[bytes]) -> tuple[Channel, Callable[[], object]]:
    port = pool.bind_to_random_port("tcp://127.0.0.1")
    channel = DialingChannel([f"tcp://127.0.0.1:{port}"], b"name")
    while not pool.poll(10):
        channel.receive(0.01)
        channel.send(b"0", b"hello")
    route, *_ = pool.recv_multipart()
    pool.router_mandatory = 1  # a message that cannot be sent waits
    return channel, lambda: pool.send_multipart([route, FRAME])


if __name__ == "__main__":
    main(sys.argv[1])
