"""Draft pools and networks before them, for scripts that draft far from the target."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

from programs import Program
from proxy import HOST

from pilotfish.cli.bench.contestants import Contestant, always, budgets_of
from pilotfish.config.engine import EngineConfig
from pilotfish.engine.drafts.remote_drafts import RemoteDrafts
from pilotfish.engine.engine import Engine
from pilotfish.engine.pools.remote_pools import worker_command
from pilotfish.engine.processes.placement import split_cores
from pilotfish.engine.processes.process import WorkerSpec
from pilotfish.wire.pool_users import RemoteDrafter


@contextmanager
def pools_beside(
    config: EngineConfig, pools: int = 1, options: Sequence[str] = ()
) -> Iterator[tuple[list[Program], EngineConfig]]:
    """So many pools on cores of their own, and an engine's configuration that leaves those alone."""
    placement = split_cores(frozenset(os.sched_getaffinity(0)), "", "", pools)
    beside = replace(config, cores=",".join(map(str, sorted(placement.target))), threads=0)
    with ExitStack() as stack:
        yield [stack.enter_context(start_pool(config, cores, options)) for cores in placement.workers], beside


def start_pool(config: EngineConfig, cores: frozenset[int] = frozenset(), options: Sequence[str] = ()) -> Program:
    """A pool of the draft of `config` on a free port of this host, loading; `told["endpoint"]` once it serves."""
    command = [*worker_command("draft", config, f"tcp://{HOST}:0", "draft pool"), "--json", *options]
    return Program(WorkerSpec("draft pool", command, cores))


def start_proxy(pool: Program, round_trip: float, mbit: float) -> Program:
    """A network before a pool, on its cores, with a round trip in milliseconds; `told["endpoint"]` once it listens."""
    arguments = (pool.told["endpoint"].removeprefix("tcp://"), str(mbit), str(round_trip))
    command = [sys.executable, str(Path(__file__).with_name("proxy.py")), *arguments]
    return Program(WorkerSpec("proxy", command, frozenset(os.sched_getaffinity(pool.pid))))


@contextmanager
def attached(engine: Engine, endpoint: str) -> Iterator[RemoteDrafts]:
    """An idle engine's connection to a pool; its drafter is for `engine.use`."""
    config = replace(engine.config, mode="async", draft_pool=(endpoint,))
    with closing(RemoteDrafts(config)) as remote:
        remote.connect(engine.tokenizer, engine.model.config.vocab_size)
        yield remote


def drafted_by(engine: Engine, drafter: RemoteDrafter) -> Contestant:
    """Mode async with the engine's own budget."""
    return Contestant(always(drafter), budgets_of(engine.config, engine, drafter))
