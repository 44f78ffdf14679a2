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
from itertools import pairwise
from pathlib import Path
from typing import Any

from pilotfish.bench.options import BenchOptions
from pilotfish.bench.pools import EndlessStreams, Window
from pilotfish.bench.programs import Program, on_target_cores, place, start_pool
from pilotfish.bench.report import ProgressBar, Report, Row, Spread
from pilotfish.bench.workload import Workload, parse_numbers
from pilotfish.config import EngineConfig
from pilotfish.core.messages import Load
from pilotfish.engine.engine import Engine
from pilotfish.errors import EngineError, ParameterError
from pilotfish.wire.curve_keys import KeyPair, new_key_pair, write_key_pair

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
    config = options.engine_config(mode="off")
    with tempfile.TemporaryDirectory() as directory:
        keys = TenantKeys.write(Path(directory), weights)
        sharing = _share(config, options, keys, partial(progress, "sharing"))
        kills: list[Kill] = []
        for _ in range(options.repeats):
            kills.append(_kill(config, options, keys))
            progress("killing")
    return Report({**sharing, **failover_of(kills)})


@dataclass(frozen=True)
class TenantKeys:
    """A pool's key and allowlist, and the keys of its clients, as files of a directory."""

    pool: KeyPair
    directory: Path
    weights: list[int]

    @classmethod
    def write(cls, directory: Path, weights: list[int]) -> TenantKeys:
        """Writes new keys, a tenant for each weight."""
        keys = cls(new_key_pair(), directory, weights)
        write_key_pair(keys.pool, directory / "pool.key")
        lines = []
        for i, weight in enumerate(weights):
            own = new_key_pair()
            write_key_pair(own, keys.client(i))
            lines.append(f"{own.public} tenant-{i} {weight}\n")
        (directory / "allow").write_text("".join(lines))
        return keys

    def client(self, tenant: int) -> Path:
        return self.directory / f"tenant-{tenant}.key"

    @property
    def pool_options(self) -> list[str]:
        """Options of `pilotfish draft`."""
        return [f"--key={self.directory / 'pool.key'}", f"--allow={self.directory / 'allow'}"]

    def target(self, config: EngineConfig, tenant: int, endpoints: Sequence[str]) -> EngineConfig:
        """A target of that tenant, attached to pools that have this key."""
        pools = {"draft_pool": tuple(endpoints), "draft_pool_key": (self.pool.public,) * len(endpoints)}
        return replace(config, mode="async", draft_key=self.client(tenant), **pools)  # type: ignore[arg-type]


# -- one pool, shared by weights


def _share(config: EngineConfig, options: BenchOptions, keys: TenantKeys, done: Callable[[], None]) -> dict[str, Any]:
    """Measures `repeats` windows after one to warm up, while the targets run on threads."""
    placement, workload = place(1), options.workload()
    with ExitStack() as stack:
        pool = stack.enter_context(start_pool(config, placement.drafts[0], keys.pool_options))
        config, endpoints = on_target_cores(config, placement), [pool.told["endpoint"]]
        busy = replace(config, budget="fixed")  # an adaptive one could leave the pool alone
        engines = [stack.enter_context(Engine(keys.target(busy, i, endpoints))) for i in range(len(keys.weights))]
        targets = [BusyTarget(engine, workload, options.streams) for engine in engines]
        stack.enter_context(running(targets))
        readings = [_read(targets)]
        for _ in range(options.repeats + 1):
            time.sleep(options.seconds)
            readings.append(_read(targets))
            done()
    return sharing_of(readings[1:], keys.weights, config.leaves)


class BusyTarget:
    """A target whose sequences always want more nodes than there are."""

    def __init__(self, engine: Engine, workload: Workload, streams: int) -> None:
        self._engine, self._workload, self._streams = engine, workload, streams
        self.stopped = threading.Event()
        self.tokens = 0  # so far

    def run(self) -> None:
        streams = EndlessStreams(self._engine, self._workload, self._streams)
        while not self.stopped.is_set():
            self.tokens += sum(streams.step())

    @property
    def load(self) -> Load | None:
        """The newest load that its pool has told."""
        assert self._engine.remote is not None  # in mode async there is one
        return self._engine.remote.pools[0].load


@contextmanager
def running(targets: Sequence[BusyTarget]) -> Iterator[None]:
    """Targets on threads; an error of one is raised at the end."""
    with ThreadPoolExecutor(len(targets)) as threads:
        futures = [threads.submit(target.run) for target in targets]
        try:
            yield
        finally:
            for target in targets:
                target.stopped.set()
        for future in futures:
            future.result()


@dataclass(frozen=True)
class Reading:
    """Rows and tokens of a target so far."""

    at: float  # seconds
    load: Load
    tokens: int


def _read(targets: Sequence[BusyTarget]) -> list[Reading]:
    """Reads all targets from the same report of the pool: the first that is new to all."""
    before = [target.load for target in targets]
    end = time.perf_counter() + LOAD_PATIENCE
    while time.perf_counter() < end:
        loads = [target.load for target in targets]
        if all(load is not None and load is not old for load, old in zip(loads, before, strict=True)):
            now = time.perf_counter()
            return [Reading(now, load, t.tokens) for load, t in zip(loads, targets, strict=True) if load is not None]
        time.sleep(0.001)
    raise EngineError(f"a target has not heard of its pool for {LOAD_PATIENCE:g} s")


def sharing_of(readings: Sequence[Sequence[Reading]], weights: Sequence[int], leaves: int) -> dict[str, Any]:
    """`readings` at the ends of windows, each of all targets. The rows of the last tenant are what others are compared
    with, window by window. Prompts' rows count among the leaves taken too."""
    pairs = [list(zip(before, after, strict=True)) for before, after in pairwise(readings)]
    rows = [_window(pair, [b.load.own_rows - a.load.own_rows for a, b in pair]) for pair in pairs]
    tokens = [_window(pair, [b.tokens - a.tokens for a, b in pair]) for pair in pairs]
    every = range(len(weights))
    tenants: list[Row] = [
        {
            "weight": weights[i],
            "rows_per_second": Spread.of([window.rate([i]) for window in rows]),
            "rows_to_last": Spread.of([window.counts[i] / window.counts[-1] for window in rows]),
            "tokens_per_second": Spread.of([window.rate([i]) for window in tokens]),
        }
        for i in every
    ]
    level_ms = [pair[0][1].load.step_ms for pair in pairs]
    taken = [window.rate(every) * ms / 1000 / leaves for window, ms in zip(rows, level_ms, strict=True)]
    near = [abs(row["rows_to_last"].median * weights[-1] / row["weight"] - 1) <= TOLERANCE for row in tenants]
    return {"tenants": tenants, "leaves_taken": Spread.of(taken), "tolerance": TOLERANCE, "sharing_holds": all(near)}


def _window(pair: Sequence[tuple[Reading, Reading]], counts: list[int]) -> Window:
    (before, after), *_ = pair
    return Window(after.at - before.at, counts)


# -- two pools, of which one is killed


@dataclass(frozen=True)
class Kill:
    """Tokens in each of KILL_PHASES; numbers of the streams in each of GROUPS."""

    windows: list[Window]
    groups: dict[str, list[int]]

    def rate(self, group: str, phase: str) -> float:
        return self.windows[KILL_PHASES.index(phase)].rate(self.groups[group])


def _kill(config: EngineConfig, options: BenchOptions, keys: TenantKeys) -> Kill:
    """Starts two pools and kills the second."""
    placement = place(2)
    with ExitStack() as stack:
        pools = [stack.enter_context(start_pool(config, cores, keys.pool_options)) for cores in placement.drafts]
        target = keys.target(on_target_cores(config, placement), 0, [pool.told["endpoint"] for pool in pools])
        engine = stack.enter_context(Engine(target))
        streams = EndlessStreams(engine, options.workload(), options.streams)
        return measure_kill(engine, streams, pools[1], options.seconds)


def measure_kill(engine: Engine, streams: EndlessStreams, victim: Program, seconds: float) -> Kill:
    """The engine is attached to several pools, the victim among them, which is killed."""
    streams.run_for(seconds)  # to warm up
    before = streams.run_for(seconds)
    streams.run(lambda: None not in pools_of(engine, streams))
    doomed = victim.told["endpoint"]
    groups = groups_of(pools_of(engine, streams), doomed)
    victim.close()
    end = time.perf_counter() + MOVE_PATIENCE
    moving = streams.run(lambda: _moved(pools_of(engine, streams), doomed) or time.perf_counter() > end)
    if time.perf_counter() > end:
        raise EngineError(f"the sessions of a dead pool have not moved within {MOVE_PATIENCE:g} s")
    return Kill([before, moving, streams.run_for(seconds)], groups)


def _moved(pools: Sequence[str | None], doomed: str) -> bool:
    return None not in pools and doomed not in pools


def groups_of(pools: Sequence[str | None], doomed: str) -> dict[str, list[int]]:
    """Numbers of the streams in each of GROUPS, by each stream's pool; EngineError where a group has none."""
    numbers = range(len(pools))
    groups = {"others": [i for i in numbers if pools[i] != doomed], "moved": [i for i in numbers if pools[i] == doomed]}
    if not all(groups.values()):
        raise EngineError(f"{len(pools)} streams are not spread over both pools")
    return groups


def pools_of(engine: Engine, streams: EndlessStreams) -> list[str | None]:
    """Names of the pools that draft for each stream; None: nobody does."""
    assert engine.remote is not None
    pools = map(engine.remote.drafter.pool_of, streams.requests)
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
