"""Several targets on one saturated pool, and one target on several pools, of which one is killed."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pilotfish.bench.options import BenchOptions
from pilotfish.bench.pools import EndlessStreams, Window, streams_on_pools
from pilotfish.bench.programs import pools_beside
from pilotfish.bench.report import ProgressBar, Report, Row, Spread
from pilotfish.bench.workload import parse_numbers
from pilotfish.core.drafting.messages import Load
from pilotfish.engine.engine import Engine
from pilotfish.errors import EngineError, ParameterError
from pilotfish.wire.curve_keys import new_key_pair, write_key_pair

#: By how much shares may differ from the weights, and how much a dead pool may cost the streams of another.
TOLERANCE = 0.1
#: Seconds within which every target is to hear of its pool's load.
LOAD_PATIENCE = 10.0
#: Seconds within which the sessions of a dead pool have to be elsewhere.
MOVE_PATIENCE = 30.0
#: `moving` is from the kill until all have moved.
KILL_PHASES = ("before", "moving", "after")
#: Streams whose pool lives, and those of the dead one.
GROUPS = ("others", "moved")


def run_sharing(options: BenchOptions, progress: ProgressBar) -> Report:
    weights = parse_numbers("weights", options.weights)
    if len(weights) < 2:
        raise ParameterError("weights", weights, "those of two targets or more")
    progress.total = 2 * options.repeats + 1
    sharing = _share(options, weights, partial(progress, "sharing"))
    kills: list[Kill] = []
    for _ in range(options.repeats):
        kills.append(_kill(options))
        progress("killing")
    return Report({**sharing, **failover_of(kills)})


# -- one pool, shared by weights


def _share(options: BenchOptions, weights: Sequence[int], done: Callable[[], None]) -> dict[str, Any]:
    """Measures `repeats` windows after one to warm up, while the targets run on threads."""
    with ExitStack() as stack:
        allowed, tenants = write_keys(Path(stack.enter_context(tempfile.TemporaryDirectory())), weights)
        (pool,), config = stack.enter_context(pools_beside(options.engine_config(mode="off"), options=allowed))
        # an adaptive budget could leave the pool alone
        busy = replace(config, mode="async", budget="fixed", draft_pool=(pool.told["endpoint"],))
        engines = [stack.enter_context(Engine(replace(busy, **tenant))) for tenant in tenants]
        targets = [EndlessStreams(engine, options.workload(), options.streams) for engine in engines]
        stack.enter_context(running(targets))
        readings = [_read(targets)]
        for _ in range(options.repeats + 1):
            time.sleep(options.seconds)
            readings.append(_read(targets))
            done()
    return sharing_of(readings[1:], weights, config.leaves)


def write_keys(directory: Path, weights: Sequence[int]) -> tuple[list[str], list[dict[str, Any]]]:
    """New keys in files: options of a pool that lets a tenant of each weight in, and those of each tenant's engine."""
    pool, tenants = new_key_pair(), [new_key_pair() for _ in weights]
    files = [directory / f"tenant-{i}.key" for i in range(len(weights))]
    for pair, file in zip((pool, *tenants), (directory / "pool.key", *files), strict=True):
        write_key_pair(pair, file)
    lines = [f"{own.public} tenant-{i} {weights[i]}\n" for i, own in enumerate(tenants)]
    (directory / "allow").write_text("".join(lines))
    engines = [{"draft_key": file, "draft_pool_key": (pool.public,)} for file in files]
    return [f"--key={directory / 'pool.key'}", f"--allow={directory / 'allow'}"], engines


@contextmanager
def running(targets: Sequence[EndlessStreams]) -> Iterator[None]:
    """Targets on threads; an error of one is raised at the end."""
    over = threading.Event()
    with ThreadPoolExecutor(len(targets)) as threads:
        futures = [threads.submit(target.run, over.is_set) for target in targets]
        try:
            yield
        finally:
            over.set()
        for future in futures:
            future.result()


@dataclass(frozen=True)
class Reading:
    """What a pool has reported of all targets, and what these were given."""

    at: float  # seconds
    rows: list[int]  # grown for each so far
    tokens: list[int]  # given to each so far
    level_ms: float


def _read(targets: Sequence[EndlessStreams]) -> Reading:
    """Reads all targets from the same report of the pool: the first that is new to all."""
    before, end = list(map(_load, targets)), time.perf_counter() + LOAD_PATIENCE
    while time.perf_counter() < end:
        loads = [load for load, old in zip(map(_load, targets), before, strict=True) if load and load is not old]
        if len(loads) == len(targets):
            tokens = [int(target.tokens.sum()) for target in targets]
            return Reading(time.perf_counter(), [load.own_rows for load in loads], tokens, loads[0].step_ms)
        time.sleep(0.001)
    raise EngineError(f"a target has not heard of its pool for {LOAD_PATIENCE:g} s")


def _load(target: EndlessStreams) -> Load | None:
    """The newest that the target's pool has told."""
    assert target.engine.remote is not None  # in mode async there is one
    return target.engine.remote.pools[0].load


def sharing_of(readings: Sequence[Reading], weights: Sequence[int], leaves: int) -> dict[str, Any]:
    """`readings` at the ends of windows. The rows of the last tenant are what others are compared with, window by
    window. Prompts' rows count among the leaves taken too."""
    seconds = np.diff([one.at for one in readings])[:, None]
    rows, tokens = (np.diff([getattr(one, name) for one in readings], axis=0) / seconds for name in ("rows", "tokens"))
    if not rows[:, -1].all():
        raise EngineError("bench: the last tenant grew no rows in a window; give more --seconds")
    tenants: list[Row] = [
        {
            "weight": weight,
            "rows_per_second": Spread.of(rows[:, i].tolist()),
            "rows_to_last": Spread.of((rows[:, i] / rows[:, -1]).tolist()),
            "tokens_per_second": Spread.of(tokens[:, i].tolist()),
        }
        for i, weight in enumerate(weights)
    ]
    taken = [sum(own) * end.level_ms / 1000 / leaves for own, end in zip(rows.tolist(), readings[1:], strict=True)]
    near = [abs(row["rows_to_last"].median * weights[-1] / row["weight"] - 1) <= TOLERANCE for row in tenants]
    return {"tenants": tenants, "leaves_taken": Spread.of(taken), "tolerance": TOLERANCE, "sharing_holds": all(near)}


# -- two pools, of which one is killed


@dataclass(frozen=True)
class Kill:
    """Tokens in each of KILL_PHASES; numbers of the streams in each of GROUPS."""

    windows: list[Window]
    groups: dict[str, list[int]]

    def rate(self, group: str, phase: str) -> float:
        return self.windows[KILL_PHASES.index(phase)].rate(self.groups[group])


def _kill(options: BenchOptions) -> Kill:
    """Starts two pools and kills the second."""
    with streams_on_pools(options, 2) as (streams, (_, victim)):
        doomed, before = victim.told["endpoint"], streams.run_for(options.seconds)
        streams.run(lambda: None not in pools_of(streams))
        groups = groups_of(pools_of(streams), doomed)
        victim.close()
        end = time.perf_counter() + MOVE_PATIENCE
        moving = streams.run(lambda: not {None, doomed} & set(pools_of(streams)) or time.perf_counter() > end)
        if time.perf_counter() > end:
            raise EngineError(f"the sessions of a dead pool have not moved within {MOVE_PATIENCE:g} s")
        return Kill([before, moving, streams.run_for(options.seconds)], groups)


def groups_of(pools: Sequence[str | None], doomed: str) -> dict[str, list[int]]:
    """Numbers of the streams in each of GROUPS, by each stream's pool; EngineError where a group has none."""
    numbers = range(len(pools))
    groups = {"others": [i for i in numbers if pools[i] != doomed], "moved": [i for i in numbers if pools[i] == doomed]}
    if not all(groups.values()):
        raise EngineError(f"{len(pools)} streams are not spread over both pools")
    return groups


def pools_of(streams: EndlessStreams) -> list[str | None]:
    """Names of the pools that draft for each stream; None: nobody does."""
    assert streams.engine.remote is not None
    pools = map(streams.engine.remote.drafter.pool_of, streams.requests)
    return [None if pool is None else pool.name for pool in pools]


def failover_of(kills: Sequence[Kill]) -> dict[str, Any]:
    """Speeds by group and phase; the others' speed over their speed before, kill by kill."""
    groups: list[Row] = [
        {
            "group": group,
            "phase": phase,
            "streams": Spread.of([len(kill.groups[group]) for kill in kills]),
            "tokens_per_second": Spread.of([kill.rate(group, phase) for kill in kills]),
        }
        for group in GROUPS
        for phase in KILL_PHASES
    ]
    kept = {
        f"kept_{phase}": Spread.of([kill.rate("others", phase) / kill.rate("others", "before") for kill in kills])
        for phase in KILL_PHASES[1:]
    }
    moved = Spread.of([kill.windows[1].seconds for kill in kills])
    holds = all(spread.median >= 1 - TOLERANCE for spread in kept.values())
    return {"groups": groups, "seconds_to_move": moved, **kept, "failover_holds": holds}
