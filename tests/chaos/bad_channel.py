"""A connection that loses, repeats, delays, reorders and damages frames."""

from __future__ import annotations

import heapq
import time
from random import Random

from pilotfish.core.peers.fields import Peer
from pilotfish.wire.channel import Channel, Received


class BadChannel:
    """What a channel receives, as a bad network delivers it while `bad`."""

    def __init__(self, channel: Channel, seed: int, faults: dict[str, float], delay: float) -> None:
        self.channel, self.faults, self.delay = channel, faults, delay
        self.bad = True
        self.counts = dict.fromkeys(faults, 0)
        self._random = Random(seed)
        self._held: list[tuple[float, int, Received]] = []
        self._number = 0

    def send(self, peer: Peer, *frames: bytes) -> bool:
        return self.channel.send(peer, *frames)

    def receive(self, timeout: float) -> list[Received]:
        deadline = time.monotonic() + timeout
        if self._held:
            timeout = min(timeout, max(self._held[0][0] - time.monotonic(), 0.0))
        for received in self.channel.receive(timeout):
            self._deliver(received)
        now = time.monotonic()
        due = []
        while self._held and self._held[0][0] <= now:
            due.append(heapq.heappop(self._held)[2])
        return due if due or now >= deadline else self.receive(deadline - now)

    def wake(self) -> None:
        self.channel.wake()

    def close(self) -> None:
        self.channel.close()

    def _deliver(self, received: Received) -> None:
        if self._happens("dropped"):
            return
        frame = received.frame
        if self._happens("flipped"):
            damaged = bytearray(frame)
            for _ in range(self._random.randrange(1, 4)):
                damaged[self._random.randrange(len(frame))] ^= 1 << self._random.randrange(8)
            frame = bytes(damaged)
        for _ in range(1 + self._happens("repeated")):
            self._hold(Received(received.peer, frame))

    def _hold(self, received: Received) -> None:
        late = self._random.uniform(0, self.delay) if self._happens("delayed") else 0.0
        self._number += 1
        heapq.heappush(self._held, (time.monotonic() + late, self._number, received))

    def _happens(self, fault: str) -> bool:
        happens = self.bad and self._random.random() < self.faults.get(fault, 0.0)
        if happens:
            self.counts[fault] += 1
        return happens
