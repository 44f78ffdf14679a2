"""Targets whose drafts run on threads of the same process, over good lines and over such that lie."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loopback import Loopback
from support import VOCAB, assert_idle, make_engine, native_model

from pilotfish.core.cache.prefix_cache import PrefixCache
from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.drafting import pools as pool_module
from pilotfish.core.drafting.draft_machine import DraftIdentity, DraftMachine
from pilotfish.core.drafting.draft_sessions import SessionTable
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

TARGET = b"target"


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


class Drafted:
    """An engine, its remote drafter, and the workers that draft for it on threads."""

    def __init__(self, engine: Engine, drafter: RemoteDrafter, workers: Sequence[DraftWorker]) -> None:
        self.engine, self.drafter, self.workers = engine, drafter, workers

    def settle(self, seconds: float = 0.0) -> None:
        """Everyone is idle: after `seconds` without a word nothing is held anywhere."""
        assert_idle(self.engine)
        assert self.engine.worker.drafter.drafter is self.drafter  # it never failed
        machine = self.drafter.machine
        assert not machine._by_request and not machine.sessions
        assert not any(pool.sessions for pool in machine.pools)
        for worker in self.workers:
            while worker.turn(0.0):
                pass
            worker._clock = lambda: time.monotonic() + seconds
            worker.machine._reported = 0.0
            worker.turn(0.0)
            table = worker.machine.table
            table.check()
            assert len(table) == 0 and table.pool.num_available == table.pool.capacity


def make_worker(draft: Path, channel: Channel, slots: int) -> DraftWorker:
    pool, shape = SlotPool(slots), LevelShape(8, 4)
    table = SessionTable(pool, PrefixCache(pool))
    executor = TorchExecutor(native_model(draft), slots, vocab_size=VOCAB)
    machine = DraftMachine(DraftIdentity("draft", "digest", {}), table, shape, executor.context)
    return DraftWorker(machine, Grower(executor, table, shape.children), channel)


@contextmanager
def drafted(
    target: Path, drafts: Sequence[Path], slots: int = 3000, seed: int | None = None, **config: Any
) -> Iterator[Drafted]:
    """Over bad lines where there is a `seed`. Pools come back soon, so that there is something to test."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(peers, "GREETING", 0.02)
        patch.setattr(pool_module, "PAUSE", 0.05)
        posts, workers, threads = dict[bytes, Callable[..., None]](), [], []
        pools = [DraftPool(f"pool {number}", b"%d" % number) for number in range(len(drafts))]
        for pool, draft in zip(pools, drafts, strict=True):
            here, there = Loopback.pair(TARGET, pool.peer)
            ends: tuple[Channel, Channel] = (here, there)
            if seed is not None:
                ends = BadLine(here, seed), BadLine(there, seed + 1)  # type: ignore[assignment]
            threads.append(ChannelThread(ends[0], period=0.01))
            posts[pool.peer] = threads[-1].post
            workers.append(make_worker(draft, ends[1], slots))
        hello = Hello(PROTOCOL_VERSION, "digest", VOCAB, "target", capabilities=list(TARGET_CAPABILITIES))
        options = RemoteOptions(wanted=100, quarantine=0.0, pools_each=len(drafts))
        drafter = RemoteDrafter(hello, pools, lambda peer, *frames: posts[peer](peer, *frames), options)
        for worker in workers:
            running = threading.Thread(target=worker.run)
            running.start()
            stack.callback(running.join)
            stack.callback(worker.stop)
        for thread in threads:
            thread.start(drafter.receive, drafter.tick)
            stack.callback(thread.close)
        while not all(pool.ready for pool in pools):
            time.sleep(0.001)
        yield Drafted(make_engine(target, drafter, nodes=16, **config), drafter, workers)
