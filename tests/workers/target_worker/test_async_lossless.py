"""Asynchronous drafts never change the output: == in float32, over a good connection and over one that lies."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loopback import Loopback
from support import SETTINGS, SNIPPETS, VOCAB, assert_idle, make_engine, native_model
from test_lossless import LENGTH, MIXED, alone, generate, params

from pilotfish.core.cache.prefix_cache import PrefixCache
from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.drafting import pools
from pilotfish.core.drafting.connected_targets import DraftIdentity
from pilotfish.core.drafting.draft_machine import DraftMachine
from pilotfish.core.drafting.draft_sessions import FORGOTTEN, SessionTable
from pilotfish.core.drafting.level_choice import LevelShape
from pilotfish.core.drafting.messages import PROTOCOL_VERSION, TARGET_CAPABILITIES, Hello
from pilotfish.core.drafting.pools import DraftPool
from pilotfish.core.drafting.target_machine import RemoteOptions
from pilotfish.core.peers import peer as peers
from pilotfish.core.peers.fields import Peer
from pilotfish.engine.drafts.remote_drafts import RemoteDrafter
from pilotfish.engine.engine import Engine
from pilotfish.model.executor import TorchExecutor
from pilotfish.wire.channel import Channel, ChannelThread, Received
from pilotfish.workers.draft import DraftWorker, Grower

POOL, TARGET = b"0", b"target"


class BadLine:
    """A channel that drops, doubles, delays, reorders and damages what it sends."""

    def __init__(self, inner: Loopback, seed: int) -> None:
        self.inner, self.rng = inner, np.random.default_rng(seed)
        self.held: list[bytes] = []

    def send(self, peer: Peer, *frames: bytes) -> bool:
        sent = [self._send(peer, frame) for frame in frames]
        return all(sent)

    def _send(self, peer: Peer, frame: bytes) -> bool:
        chance = self.rng.random()
        if chance < 0.02:
            return True  # lost, though it seemed not
        if chance < 0.05:
            flipped = bytearray(frame)
            for place in self.rng.integers(0, 8 * len(frame), 1 + int(self.rng.integers(3))).tolist():
                flipped[place // 8] ^= 1 << place % 8
            frame = bytes(flipped)
        if chance > 0.93:
            self.held.append(frame)
            if len(self.held) < 4:
                return True
            self.rng.shuffle(self.held)
            late, self.held = self.held, []
            for delayed in late:
                self.inner.send(peer, delayed)
            return True
        return self.inner.send(peer, frame) and (chance < 0.9 or self.inner.send(peer, frame))

    def receive(self, timeout: float) -> list[Received]:
        return self.inner.receive(timeout)

    def wake(self) -> None:
        self.inner.wake()

    def close(self) -> None:
        self.inner.close()


@dataclass
class Drafting:
    """An engine, its remote drafter, and the worker that drafts for it on a thread."""

    engine: Engine
    drafter: RemoteDrafter
    worker: DraftWorker

    def settle(self, seconds: float) -> None:
        """Everyone is idle: after `seconds` without a word nothing is held anywhere."""
        assert_idle(self.engine)
        assert self.engine.worker.drafter.drafter is self.drafter  # it never failed
        assert not self.drafter.machine._by_request and not self.drafter.machine.sessions
        assert not any(pool.sessions for pool in self.drafter.machine.pools)
        while self.worker.turn(0.0):
            pass
        self.worker._clock = lambda: time.monotonic() + seconds
        self.worker.machine._reported = 0.0
        self.worker.turn(0.0)
        self.worker.machine.table.check()
        assert len(self.worker.machine.table) == 0
        assert self.worker.machine.table.pool.num_available == self.worker.machine.table.pool.capacity


@contextmanager
def drafting(
    target: Path, draft: Path, seed: int | None = None, slots: int = 3000, **config: Any
) -> Iterator[Drafting]:
    """Over a bad line where there is a `seed`."""
    ends: tuple[Channel, Channel] = Loopback.pair(TARGET)
    if seed is not None:
        here, there = Loopback.pair(TARGET)
        ends = BadLine(here, seed), BadLine(there, seed + 1)
    pool, shape = SlotPool(slots), LevelShape(8, 4)
    table = SessionTable(pool, PrefixCache(pool))
    executor = TorchExecutor(native_model(draft), slots, vocab_size=VOCAB)
    machine = DraftMachine(DraftIdentity("draft", "digest", {}), table, shape, executor.context)
    grower = Grower(executor, table, shape.children)
    worker = DraftWorker(machine, grower, ends[1])
    hello = Hello(PROTOCOL_VERSION, "digest", VOCAB, "target", capabilities=list(TARGET_CAPABILITIES))
    draft_pool = DraftPool("loopback", POOL)
    options = RemoteOptions(wanted=100, quarantine=0.0)
    channel_thread = ChannelThread(ends[0], period=0.01)
    drafter = RemoteDrafter(hello, [draft_pool], channel_thread.post, options)
    thread = threading.Thread(target=worker.run)
    thread.start()
    channel_thread.start(drafter.receive, drafter.tick)
    try:
        while not draft_pool.ready:
            time.sleep(0.001)
        yield Drafting(make_engine(target, drafter, nodes=16, **config), drafter, worker)
    finally:
        channel_thread.close()
        worker.stop()
        thread.join()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools come back soon, so that there is something to test."""
    monkeypatch.setattr(peers, "GREETING", 0.02)
    monkeypatch.setattr(pools, "PAUSE", 0.05)


def test_every_prompt_with_every_setting(llama: Path, draft: Path) -> None:
    with drafting(llama, draft) as d:
        for shift in range(len(SETTINGS)):
            cases = [(i, (i + shift) % len(SETTINGS)) for i in range(len(SNIPPETS))]
            assert generate(d.engine, cases, together=True) == [alone(llama)[case] for case in cases]
    d.settle(0.0)
    drops = d.drafter.machine.pools[0].drops.counts
    assert d.drafter.machine.counts.hits > 20 and drops["dropped_nodes"] == drops["malformed_frames"] == 0
    assert (
        d.worker.machine.counts.used > 20 and d.worker.machine.counts.resyncs == d.worker.machine.counts.malformed == 0
    )


def test_what_is_guessed_for_changes_on_the_way(llama: Path, draft: Path) -> None:
    """As a guard does that cuts a variant, and lets it go on."""
    with drafting(llama, draft) as d:
        samples = [d.engine.submit(SNIPPETS[i], params((i, j)))[0] for i, j in MIXED]
        for step in range(10**6):
            if not d.engine.busy:
                break
            sample = samples[step % len(samples)]
            if sample.finish_reason is None:
                d.engine.revise(sample, (0, None, 2)[step // 3 % 3])
            d.engine.step()
        assert [sample.token_ids for sample in samples] == [alone(llama)[case] for case in MIXED]
    d.settle(0.0)


def test_int8_kv(llama: Path, draft: Path) -> None:
    plain = generate(make_engine(llama, kv_dtype="int8"), MIXED, together=False)
    with drafting(llama, draft, kv_dtype="int8", pace="target=4ms") as d:  # time for a level in each step
        assert generate(d.engine, MIXED, together=True) == plain
    d.settle(0.0)
    assert d.drafter.machine.counts.hits > 0


@pytest.mark.parametrize("requests", [1, 3])
def test_fewer_at_once(llama: Path, draft: Path, requests: int) -> None:
    with drafting(llama, draft, max_requests=requests) as d:
        assert generate(d.engine, MIXED, together=True) == [alone(llama)[case] for case in MIXED]
    d.settle(0.0)


def test_a_draft_with_too_few_slots(llama: Path, draft: Path) -> None:
    with drafting(llama, draft, slots=120) as d:
        assert generate(d.engine, MIXED, together=True) == [alone(llama)[case] for case in MIXED]
    d.settle(0.0)


def test_preempted_requests(llama: Path, draft: Path) -> None:
    with drafting(llama, draft, kv_slots=150) as d:
        d.engine.worker.scheduler.headroom = 1
        samples = [d.engine.submit(SNIPPETS[case[0]], params(case))[0] for case in MIXED]
        while d.engine.busy:
            d.engine.step()
        assert sum(sample.request.stats.preemptions for sample in samples) > 1
        assert [sample.token_ids for sample in samples] == [alone(llama)[case] for case in MIXED]
    d.settle(0.0)


@pytest.mark.parametrize("seed", [0, 100])
def test_a_line_that_lies(llama: Path, draft: Path, seed: int) -> None:
    """Frames lost, doubled, late and damaged both ways; every fifth request aborted on its way."""
    rng = np.random.default_rng(seed)
    with drafting(llama, draft, seed=seed) as d:
        for shift in range(0, len(SETTINGS), 2):
            cases = [(i, (i + shift) % len(SETTINGS)) for i in range(len(SNIPPETS))]
            samples = [d.engine.submit(SNIPPETS[case[0]], params(case))[0] for case in cases]
            while d.engine.busy:
                d.engine.step()
                if rng.random() < 0.05:
                    d.engine.abort(samples[int(rng.integers(len(samples)))])
            for case, sample in zip(cases, samples, strict=True):
                assert sample.token_ids == alone(llama)[case][: len(sample.token_ids)]
                assert sample.finish_reason == "abort" or sample.token_ids == alone(llama)[case]
                assert len(sample.token_ids) <= LENGTH
    d.settle(FORGOTTEN + 1)  # a Close may have been lost
    assert d.drafter.machine.counts.trees > 20
    drops = d.drafter.machine.pools[0].drops.counts
    assert drops["malformed_frames"] + d.worker.machine.counts.malformed and drops["stale_frames"]
