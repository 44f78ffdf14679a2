"""Prefill workers as threads of the test's process: their models, loops, memory and sockets are real, no interpreter
starts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
from support import NoProcesses, assert_idle, eventually, running

from pilotfish.config.engine import EngineConfig
from pilotfish.config.workers import PrefillConfig
from pilotfish.engine.engine import Engine
from pilotfish.engine.pools import remote_pools
from pilotfish.engine.prefills.prefill_pool import serving
from pilotfish.engine.prefills.remote_prefills import RemotePrefills
from pilotfish.kv.arena import Arena
from pilotfish.wire.channel import Channel
from pilotfish.wire.curve_keys import load_pool_keys
from pilotfish.wire.sockets import ListeningChannel
from pilotfish.workers.prefill import PrefillWorker

#: Seconds that a worker may take to give back what it held.
SETTLE = 10.0


@contextmanager
def inline_prefills(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[list[PrefillWorker]]:
    """Engines have their prefill workers here, until the end; the workers, in the order of their start. `options` are
    of `prefill_worker`."""
    with ExitStack() as stack, monkeypatch.context() as patch:
        make, workers = RemotePrefills.__init__, list[PrefillWorker]()

        def start(prefills: RemotePrefills, config: EngineConfig, *rest: Any) -> None:
            make(prefills, config, *rest)
            for endpoint in () if config.prefill_pool else prefills.endpoints:
                workers.append(stack.enter_context(prefill_worker(config.of_prefill, endpoint, **options)))

        patch.setattr(remote_pools, "Supervisor", NoProcesses)
        patch.setattr(RemotePrefills, "__init__", start)
        yield workers


@contextmanager
def prefill_worker(
    model: EngineConfig,
    endpoint: str,
    wrapped: Callable[[Channel], Channel] = lambda channel: channel,
    **options: Any,
) -> Iterator[PrefillWorker]:
    """One that listens at `endpoint`, until the end. `wrapped` may put something between it and its channel; `options`
    are of `PrefillConfig`. What it raises is raised at the end."""
    config = PrefillConfig(model=model, listen=endpoint, **options)
    listening = ListeningChannel(endpoint, load_pool_keys(config.key, config.allow))
    with (
        closing(wrapped(listening)) as channel,
        serving(config, channel) as worker,
        running(worker.run, worker.stop),
    ):
        yield worker


def arena_of(worker: PrefillWorker) -> Arena:
    arena = worker.shared.machine._places
    assert isinstance(arena, Arena)
    return arena


def assert_nothing_left(workers: Sequence[PrefillWorker], *engines: Engine) -> None:
    """No slot, no place, no lease. What a target has just released may be on its way."""
    for engine in engines:
        assert_idle(engine)
        assert engine.prefills is not None and not engine.prefills.handovers.machine._incoming
    for worker in workers:
        eventually(lambda one=worker: not any(held(one).values()), SETTLE, told=lambda one=worker: held(one))
        worker.check()


def held(worker: PrefillWorker) -> dict[str, int]:
    """For hand-overs."""
    pool, arena = worker.scheduler.pool, arena_of(worker)
    slots, places = pool.capacity - pool.num_available, arena.plan.places - len(arena._free)
    return {"orders": len(worker.shared.machine.orders), "slots": slots, "places": places}
