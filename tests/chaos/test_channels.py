"""A connection that loses, repeats, delays, reorders and damages frames, both ways."""

import heapq
import time
from pathlib import Path
from random import Random

import pytest
from loopback import Loopback
from sizes import sized
from support import assert_idle, eventually, run
from workers import PARAMS, PROMPTS, engine_over, threaded_pool

from pilotfish.core.drafting import draft_sessions, pools
from pilotfish.core.peers.fields import Peer
from pilotfish.wire.channel import Channel, Received

FAULTS = {
    "dropped": {"dropped": 0.1},
    "repeated": {"repeated": 0.3},
    "delayed": {"delayed": 1.0},
    "flipped": {"flipped": 0.1},
    "all": {"dropped": 0.03, "repeated": 0.05, "delayed": 0.1, "flipped": 0.03},
}


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


@pytest.mark.parametrize("kind", sized(["all"], list(FAULTS)))
def test_a_bad_network_changes_no_output(
    kind: str, llama: Path, draft: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "PAUSE", 0.2)
    near, far = Loopback.pair(b"target")
    ends = BadChannel(near, 1, FAULTS[kind], 0.2), BadChannel(far, 2, FAULTS[kind], 0.2)
    with threaded_pool(draft, ends[1]) as worker, engine_over(llama, ends[0]) as engine:
        drafter = engine.drafter
        assert run(engine, PROMPTS[:50], PARAMS[:50]) == expected[:50]
        while worker.machine.grown < 200 or drafter.machine.pools[0].score.trees < 20:  # or it is through too fast
            assert run(engine, PROMPTS[:10], PARAMS[:10]) == expected[:10]
        for fault in FAULTS[kind]:
            assert ends[0].counts[fault] > 0 and ends[1].counts[fault] > 0
        assert engine.worker.drafter.drafter is drafter  # it has never raised
        for end in ends:
            end.bad = False
        trees = drafter.machine.pools[0].score.trees
        while drafter.machine.pools[0].score.trees < trees + 100:
            assert run(engine, PROMPTS[:10], PARAMS[:10]) == expected[:10]
        assert_idle(engine)
        monkeypatch.setattr(draft_sessions, "FORGOTTEN", 0.0)  # those whose Close was lost
        eventually(lambda: len(worker.machine.table) == 0)
    table = worker.machine.table
    table.check()
    for session in [*table]:  # a message that came late may have opened it anew
        table.close(session)
    assert table.pool.num_available == table.pool.capacity
