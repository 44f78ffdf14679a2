"""Locks, threads and memory around a target's machine of hand-overs, without a model."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from support import eventually, make_engine

from pilotfish.core.cache.slots import Slots
from pilotfish.core.peers.fields import Peer
from pilotfish.core.prefilling.handover import HandOver
from pilotfish.core.prefilling.handover_machine import GONE, HandOverMachine
from pilotfish.core.prefilling.prefill_messages import (
    MAC_KEY_BYTES,
    PREFILL_VERSION,
    PrefillHello,
    PrefillOrder,
    SegmentReady,
    ToPrefill,
    Welcome,
)
from pilotfish.core.prefilling.prefill_pools import PrefillPool
from pilotfish.core.prefilling.segments import KVIdentity, KVLayout, SegmentReference, sequence_digest
from pilotfish.engine.pools import remote_pools
from pilotfish.engine.prefills.handovers import HandOvers
from pilotfish.kv.arena import Arena, Bytes
from pilotfish.kv.readers import content
from pilotfish.wire.channel import Received, decode_to_prefill, encode

LAYOUT = KVLayout(2, 0, 1, [4, 4])
IDENTITY = KVIdentity({"weights": "0a1b"}, LAYOUT)
PEER: Peer = b"0"


@dataclass
class Writer:
    """Slots that hold on to whoever writes to them."""

    written: list[tuple[list[int], range]] = field(default_factory=list)
    began: threading.Event = field(default_factory=threading.Event)
    may_end: threading.Event = field(default_factory=threading.Event)

    def write_layers(self, slots: Slots, layers: range, data: Bytes) -> None:  # noqa: ARG002
        self.began.set()
        assert self.may_end.wait(10)
        self.written.append((slots.tolist(), layers))


@dataclass
class Side:
    """A target's side of hand-overs, and the arena of a worker that this test plays."""

    handovers: HandOvers
    arena: Arena
    writer: Writer
    sent: list[ToPrefill]

    @property
    def pool(self) -> PrefillPool:
        (pool,) = self.handovers.machine.pools
        return pool

    def say(self, message: Welcome | SegmentReady) -> None:
        self.handovers.receive(Received(PEER, encode(message)))

    def welcome(self) -> None:
        offer = self.arena.offer()
        self.say(Welcome(PREFILL_VERSION, IDENTITY, "tiny", 100, bytes(MAC_KEY_BYTES), 2.0, 4096, offer))
        eventually(lambda: self.pool.ready)

    def begin(self, tokens: int = 5) -> HandOver:
        handover = HandOver(list(range(tokens)), np.arange(10, 10 + tokens, dtype=np.int32))
        assert self.handovers.worth_sending(handover.tokens, 0, None, 0, 0)
        self.handovers.begin(handover)
        return handover

    def hand_over(self) -> None:
        """All that was ordered last, as one segment."""
        order = next(one for one in reversed(self.sent) if isinstance(one, PrefillOrder))
        size = 2 * len(order.tokens) * LAYOUT.token_bytes
        place = self.arena.take(b"target", size)
        assert place is not None
        data = self.arena.buffer(place)
        data[:] = 7
        whole = (0, len(order.tokens), 0, 2, place, size, LAYOUT.digest(), content(data.data))
        digest = sequence_digest(order.tokens)
        reference = SegmentReference(self.arena.epoch(place), order.handover, digest, 0, *whole)
        self.say(SegmentReady(reference.signed(bytes(MAC_KEY_BYTES))))


@pytest.fixture
def side() -> Iterator[Side]:
    writer, sent, arena = Writer(), list[ToPrefill](), Arena(1 << 16, 1 << 12)
    machine = HandOverMachine(PrefillHello(PREFILL_VERSION, IDENTITY, "tiny"), [PrefillPool("pool", PEER)], 1)
    handovers = HandOvers(
        machine, writer, LAYOUT, lambda _, *frames: sent.extend(decode_to_prefill(frame) for frame in frames)
    )
    yield Side(handovers, arena, writer, sent)
    writer.may_end.set()
    handovers.close()
    arena.close()


def mapped() -> int:
    """How often memory for segments is mapped in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:pilotfish segments")


def test_who_ends_a_hand_over_waits_for_who_writes(side: Side) -> None:
    side.welcome()
    handover = side.begin()
    side.hand_over()
    assert side.writer.began.wait(10)
    cancelling = threading.Thread(target=side.handovers.cancel, args=(handover,))
    cancelling.start()
    cancelling.join(0.05)
    assert cancelling.is_alive() and not side.writer.written
    side.writer.may_end.set()
    cancelling.join(10)
    assert not cancelling.is_alive()
    assert handover.count == 0 and side.writer.written == [([10, 11, 12, 13, 14], range(2))]


def test_nobody_writes_for_a_hand_over_that_has_ended(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    side.welcome()
    handover = side.begin()
    (source,) = side.handovers._sources.values()
    assert source.reader is not None
    read, reading, may_read = source.reader.read, threading.Event(), threading.Event()

    def slow(reference: SegmentReference) -> Bytes:
        reading.set()
        assert may_read.wait(10)
        return read(reference)

    monkeypatch.setattr(source.reader, "read", slow)
    side.writer.may_end.set()
    side.hand_over()
    assert reading.wait(10)
    side.handovers.cancel(handover)
    may_read.set()
    again = side.begin()
    side.hand_over()
    eventually(lambda: side.handovers.poll() or again.count is not None)
    assert (handover.count, again.count) == (0, 5)
    assert len(side.writer.written) == 1  # the second one's
    assert (handover.report.size, again.report.size) == (0, 5 * 2 * LAYOUT.token_bytes)


def test_a_hand_over_whose_pool_is_lost_as_it_begins_may_be_cancelled(side: Side) -> None:
    side.welcome()
    handover = HandOver([1, 2, 3], np.arange(3, dtype=np.int32))
    assert side.handovers.worth_sending(handover.tokens, 0, None, 0, 0)
    side.handovers.machine.lost(side.pool, "it hung up")
    side.handovers.begin(handover)
    assert (handover.count, handover.report.outcome) == (0, GONE)
    side.handovers.cancel(handover)
    assert (handover.count, handover.report.outcome) == (0, GONE)


def test_memory_of_a_pool_that_is_lost_is_given_back(side: Side) -> None:
    """Whoever maps a dead worker's memory keeps it from the one that is started in its place."""
    before = mapped()
    for _ in range(2):
        side.welcome()
        assert mapped() == before + 1
        side.handovers.machine.lost(side.pool, "it hung up")
        side.handovers.tick()
        eventually(lambda: mapped() == before)


def test_threads_of_others_have_their_turns_as_before(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_pools, "ANSWER", 0.01)
    nobody = f"ipc://{tmp_path}/nobody"
    pools = {"draft_pool": (nobody,), "prefill_pool": (f"{nobody}-either",)}
    shared = sys.getswitchinterval()  # of a process where engines of other tests may be open
    try:
        sys.setswitchinterval(0.005)
        with make_engine(llama, mode="async", drafter="lm", draft_optional=True, **pools):
            assert sys.getswitchinterval() < 0.005
        assert sys.getswitchinterval() == 0.005
    finally:
        sys.setswitchinterval(shared)
