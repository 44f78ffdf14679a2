"""Targets whose drafts run on threads of the same process."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from loopback import Loopback
from support import VOCAB, assert_idle, eventually, make_engine, native_model, running

from pilotfish.core.cache.prefix_cache import PrefixCache
from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.drafting import pools as pool_module
from pilotfish.core.drafting.connected_targets import DraftIdentity
from pilotfish.core.drafting.draft_machine import DraftMachine
from pilotfish.core.drafting.draft_sessions import SessionTable
from pilotfish.core.drafting.level_choice import LevelShape
from pilotfish.core.drafting.messages import PROTOCOL_VERSION, TARGET_CAPABILITIES, Hello
from pilotfish.core.drafting.pools import DraftPool
from pilotfish.core.drafting.target_machine import RemoteOptions
from pilotfish.core.peers import peer as peers
from pilotfish.engine.engine import Engine
from pilotfish.model.executor import TorchExecutor
from pilotfish.wire.channel import Channel, ChannelThread
from pilotfish.wire.pool_users import RemoteDrafter
from pilotfish.workers.draft import DraftWorker, Grower

TARGET = b"target"


class Drafted:
    """An engine, its remote drafter, and the workers that draft for it on threads."""

    def __init__(self, engine: Engine, drafter: RemoteDrafter, workers: Sequence[DraftWorker]) -> None:
        self.engine, self.drafter, self.workers = engine, drafter, workers

    def settle(self) -> None:
        """Everyone is idle: nothing is held anywhere."""
        assert_idle(self.engine)
        assert self.engine.worker.drafter.drafter is self.drafter  # it never failed
        machine = self.drafter.machine
        assert not machine._by_request and not machine.sessions
        assert not any(pool.sessions for pool in machine.pools)
        for worker in self.workers:
            while worker.turn(0.0):
                pass
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
def drafted(target: Path, drafts: Sequence[Path], slots: int = 3000, **config: Any) -> Iterator[Drafted]:
    """Pools come back soon, so that there is something to test."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(peers, "GREETING", 0.02)
        patch.setattr(pool_module, "PAUSE", 0.05)
        posts, workers, threads = dict[bytes, Callable[..., None]](), [], []
        pools = [DraftPool(f"pool {number}", b"%d" % number) for number in range(len(drafts))]
        for pool, draft in zip(pools, drafts, strict=True):
            here, there = Loopback.pair(TARGET, pool.peer)
            threads.append(ChannelThread(here, period=0.01))
            posts[pool.peer] = threads[-1].post
            workers.append(make_worker(draft, there, slots))
        hello = Hello(PROTOCOL_VERSION, "digest", VOCAB, "target", capabilities=list(TARGET_CAPABILITIES))
        options = RemoteOptions(wanted=100, quarantine=0.0, pools_each=len(drafts))
        drafter = RemoteDrafter(hello, pools, lambda peer, *frames: posts[peer](peer, *frames), options)
        for worker in workers:
            stack.enter_context(running(worker.run, worker.stop))
        for thread in threads:
            thread.start(drafter.receive, drafter.tick)
            stack.callback(thread.close)
        eventually(lambda: all(pool.ready for pool in pools))
        yield Drafted(make_engine(target, drafter, nodes=16, **config), drafter, workers)
