"""Several targets on one saturated pool, and one target on several pools, of which one is killed."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from pilotfish.bench.options import BenchOptions
from pilotfish.bench.pools import EndlessStreams, Window
from pilotfish.bench.programs import Program, on_target_cores, place, start_pool
from pilotfish.bench.report import Progress, Report, Row, Spread
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
#: transformers loads one model at a time.
_LOADING = threading.Lock()


def run_sharing(options: BenchOptions, progress: Progress) -> Report:
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
    return Report({**sharing, **failover_of(kills, TOLERANCE)})


@dataclass(frozen=True)
class TenantKeys:
    """A pool's key and allowlist, and the keys of its clients, as files of a directory."""

    pool: KeyPair
    directory: Path
    weights: list[int]

    @classmethod
    def write(cls, directory: Path, weights: list[int]) -> TenantKeys:
        """New ones, a tenant for each weight."""
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
        """For `pilotfish draft`."""
        return [f"--key={self.directory / 'pool.key'}", f"--allow={self.directory / 'allow'}"]

    def target(self, config: EngineConfig, tenant: int, endpoints: Sequence[str]) -> EngineConfig:
        """A target of that tenant, attached to pools that have this key."""
        pools = {"draft_pool": tuple(endpoints), "draft_pool_key": (self.pool.public,) * len(endpoints)}
        return replace(config, mode="async", draft_key=self.client(tenant), **pools)  # type: ignore[arg-type]


# -- one pool, shared by weights


def _share(config: EngineConfig, options: BenchOptions, keys: TenantKeys, done: Callable[[], None]) -> dict[str, Any]:
    """A window to warm up, then `repeats`, while the targets run on threads."""
    placement, workload = place(1), options.workload()
    with start_pool(config, placement.drafts[0], keys.pool_options) as pool:
        target = partial(keys.target, on_target_cores(config, placement), endpoints=[pool.told["endpoint"]])
        targets = [BusyTarget(target(i), workload, options.streams) for i in range(len(keys.weights))]
        with running(targets):
            readings = [_read(targets)]
            for _ in range(options.repeats + 1):
                time.sleep(options.seconds)
                readings.append(_read(targets))
                done()
    return sharing_of(readings[1:], keys.weights, config.leaves, TOLERANCE)


class BusyTarget:
    """A target whose sequences always want more nodes than there are. Its engine lives on a thread of its own."""

    def __init__(self, config: EngineConfig, workload: Workload, streams: int) -> None:
        self._config = replace(config, budget="fixed")  # an adaptive one could leave the pool alone
        self._workload = workload
        self._streams = streams
        self._stopped = threading.Event()
        self._engine: Future[Engine] = Future()
        self.tokens = 0  # so far

    def run(self) -> None:
        """Until `stop`."""
        with self._started() as engine:
            streams = EndlessStreams(engine, self._workload, self._streams)
            while not self._stopped.is_set():
                self.tokens += sum(streams.step())

    def _started(self) -> Engine:
        try:
            with _LOADING:
                engine = Engine(self._config)
        except BaseException as error:
            self._engine.set_exception(error)
            raise
        self._engine.set_result(engine)
        return engine

    def stop(self) -> None:
        self._stopped.set()

    def load(self) -> Load | None:
        """The newest that its pool has told. Waits for the engine; raises what has kept it from its start."""
        remote = self._engine.result().remote
        assert remote is not None  # in mode async there is one
        return remote.pools[0].load


@contextmanager
def running(targets: Sequence[BusyTarget]) -> Iterator[None]:
    """Targets on threads; an error of one is raised at the end."""
    with ThreadPoolExecutor(len(targets)) as threads, ExitStack() as stack:
        futures = [threads.submit(target.run) for target in targets]
        for target in targets:
            stack.callback(target.stop)
        yield
        stack.close()
        for future in futures:
            future.result()


@dataclass(frozen=True)
class Reading:
    """Rows and tokens of a target so far."""

    at: float  # seconds
    load: Load
    tokens: int


def _read(targets: Sequence[BusyTarget]) -> list[Reading]:
    """Of all targets, from the same report of the pool: the first that is new to all."""
    before = [target.load() for target in targets]
    end = time.perf_counter() + LOAD_PATIENCE
    while time.perf_counter() < end:
        loads = [target.load() for target in targets]
        if all(load is not None and load is not old for load, old in zip(loads, before, strict=True)):
            now = time.perf_counter()
            return [Reading(now, load, t.tokens) for load, t in zip(loads, targets, strict=True) if load is not None]
        time.sleep(0.001)
    raise EngineError(f"a target has not heard of its pool for {LOAD_PATIENCE:g} s")


def sharing_of(
    readings: Sequence[Sequence[Reading]], weights: Sequence[int], leaves: int, tolerance: float
) -> dict[str, Any]:
    """`readings` at the ends of windows, each of all targets."""
    seconds = [after[0].at - before[0].at for before, after in pairwise(readings)]
    rows = [[b.load.own_rows - a.load.own_rows for a, b in zip(*pair, strict=True)] for pair in pairwise(readings)]
    tokens = [[b.tokens - a.tokens for a, b in zip(*pair, strict=True)] for pair in pairwise(readings)]
    levels = [1000 * s / after[0].load.step_ms for s, after in zip(seconds, readings[1:], strict=True)]
    tenants: list[Row] = [
        {
            "weight": weight,
            "rows_per_second": Spread.of([window[i] / s for window, s in zip(rows, seconds, strict=True)]),
            "rows_to_last": Spread.of([window[i] / window[-1] for window in rows]),
            "tokens_per_second": Spread.of([window[i] / s for window, s in zip(tokens, seconds, strict=True)]),
        }
        for i, weight in enumerate(weights)
    ]
    filled = Spread.of([sum(window) / number / leaves for window, number in zip(rows, levels, strict=True)])
    near = [abs(row["rows_to_last"].median * weights[-1] / row["weight"] - 1) <= tolerance for row in tenants]
    return {"tenants": tenants, "leaves_taken": filled, "tolerance": tolerance, "sharing_holds": all(near)}


# -- two pools, of which one is killed


@dataclass(frozen=True)
class Kill:
    """Tokens/s of each stream group in each of KILL_PHASES."""

    seconds_to_move: float
    streams: dict[str, int]  # of each group
    tokens_per_second: dict[str, list[float]]  # by group, in order of KILL_PHASES

    def kept(self, phase: str) -> float:
        """Of the others' speed before the kill, the share that they have in a phase."""
        speeds = self.tokens_per_second["others"]
        return speeds[KILL_PHASES.index(phase)] / speeds[0]


def _kill(config: EngineConfig, options: BenchOptions, keys: TenantKeys) -> Kill:
    """Of the second of two new pools."""
    placement = place(2)
    with ExitStack() as stack:
        pools = [stack.enter_context(start_pool(config, cores, keys.pool_options)) for cores in placement.drafts]
        target = keys.target(on_target_cores(config, placement), 0, [pool.told["endpoint"] for pool in pools])
        engine = stack.enter_context(Engine(target))
        streams = EndlessStreams(engine, options.workload(), options.streams)
        return measure_kill(engine, streams, pools[1], options.seconds)


def measure_kill(engine: Engine, streams: EndlessStreams, victim: Program, seconds: float) -> Kill:
    """The engine is attached to several pools, the victim among them, which ends in this."""
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
    return kill_of(groups, [before, moving, streams.run_for(seconds)])


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


def kill_of(groups: Mapping[str, Sequence[int]], windows: Sequence[Window]) -> Kill:
    """`windows` in order of KILL_PHASES; `groups` by name, with the numbers of their streams."""
    speeds = {name: [window.rate(streams) for window in windows] for name, streams in groups.items()}
    return Kill(windows[1].seconds, {name: len(streams) for name, streams in groups.items()}, speeds)


def failover_of(kills: Sequence[Kill], tolerance: float) -> dict[str, Any]:
    """At least one kill. The others' speed is over that before, kill by kill."""
    moving, after = (Spread.of([kill.kept(phase) for kill in kills]) for phase in KILL_PHASES[1:])
    return {
        "groups": [_group(kills, group, phase) for group in GROUPS for phase in KILL_PHASES],
        "seconds_to_move": Spread.of([kill.seconds_to_move for kill in kills]),
        "kept_while_moving": moving,
        "kept_after": after,
        "failover_holds": min(moving.median, after.median) >= 1 - tolerance,
    }


def _group(kills: Sequence[Kill], group: str, phase: str) -> Row:
    speeds = [kill.tokens_per_second[group][KILL_PHASES.index(phase)] for kill in kills]
    streams = Spread.of([kill.streams[group] for kill in kills])
    return {"group": group, "phase": phase, "streams": streams, "tokens_per_second": Spread.of(speeds)}
