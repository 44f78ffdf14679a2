"""Waiting for channels. Nothing here asserts a time: what does not come in LONG seconds does not come."""

import time
from collections.abc import Callable

from pilotfish.core.peers.fields import Peer
from pilotfish.wire.channel import Channel, Received
from pilotfish.wire.sockets import DialingChannel, ListeningChannel

LONG = 20.0


def until(condition: Callable[[], bool], *channels: Channel) -> list[Received]:
    """Let the channels work until the condition holds; what they received."""
    deadline, received = time.monotonic() + LONG, list[Received]()
    while not condition():
        assert time.monotonic() < deadline
        for channel in channels:
            received += channel.receive(0.005)
    return received


def exactly(count: int, channel: Channel, *others: Channel) -> list[Received]:
    """The next `count` messages of a channel, while `others` work too."""
    received: list[Received] = []

    def enough() -> bool:
        received.extend(channel.receive(0.005))
        return len(received) >= count

    until(enough, *others)
    assert len(received) == count
    return received


def connect(dialing: DialingChannel, *others: Channel, pool: Peer = b"0") -> list[Received]:
    """Until frames to the pool are taken; what the channels received meanwhile."""
    return until(lambda: dialing.problem(pool) is None, dialing, *others)


def introduce(dialing: DialingChannel, listening: ListeningChannel, frame: bytes = b"hello") -> Received:
    """Connect; the first frame of the target, as the pool receives it."""
    connect(dialing, listening)
    until(lambda: dialing.send(b"0", frame), dialing, listening)
    return exactly(1, listening, dialing)[0]


def silent(*channels: Channel) -> bool:
    """Whether nothing comes, after everything had ample time to."""
    return not [received for _ in range(20) for channel in channels for received in channel.receive(0.01)]
