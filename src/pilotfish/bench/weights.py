"""Targets that share one saturated pool by their weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from pilotfish.bench.budget import Workload
from pilotfish.bench.compare import Spread
from pilotfish.bench.streams import Streams
from pilotfish.config import EngineConfig
from pilotfish.core.messages import Load
from pilotfish.engine.engine import Engine
from pilotfish.errors import EngineError
from pilotfish.wire.curve_keys import KeyPair, new_key_pair, write_key_pair

#: Seconds within which every target is to hear of its pool's load.
PATIENCE = 10.0
#: transformers loads one model at a time.
_LOADING = threading.Lock()


@dataclass(frozen=True)
class Keys:
    """A pool's key and allowlist, and the keys of its clients, as files of a directory."""

    pool: KeyPair
    directory: Path
    weights: list[int]

    @classmethod
    def write(cls, directory: Path, weights: list[int]) -> Keys:
        """Fresh ones, a tenant for each weight."""
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
            streams = Streams(engine, self._workload, self._streams)
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


@dataclass(frozen=True)
class Reading:
    """How far a target has come."""

    at: float  # seconds
    load: Load
    tokens: int


@dataclass(frozen=True)
class TenantSpeed:
    """One target, over windows."""

    weight: int
    rows_per_second: Spread
    rows_to_last: Spread  # rows over those of the last tenant, window by window
    tokens_per_second: Spread


@dataclass(frozen=True)
class WeightedSharing:
    tenants: list[TenantSpeed]
    filled: Spread  # share of the leaves that levels can take that were taken; prompts' rows count too
    tolerance: float
    holds: bool  # every median ratio is that of the weights within the tolerance


@dataclass(frozen=True)
class _Window:
    """Between two readings: rows and tokens of each target."""

    seconds: float
    rows: list[int]
    tokens: list[int]
    filled: float


def measure_sharing(
    targets: Sequence[BusyTarget], weights: Sequence[int], leaves: int, seconds: float, repeats: int,
    tolerance: float, done: Callable[[], None],
) -> WeightedSharing:  # fmt: skip
    """A window to warm up, then `repeats`, while the targets run on threads."""
    with running(targets):
        readings = [_read(targets)]
        for _ in range(repeats + 1):
            time.sleep(seconds)
            readings.append(_read(targets))
            done()
    return sharing_of(readings[1:], weights, leaves, tolerance)


@contextmanager
def running(targets: Sequence[BusyTarget]) -> Iterator[None]:
    """An error of one comes up at the end."""
    with ThreadPoolExecutor(len(targets)) as threads, ExitStack() as stack:
        futures = [threads.submit(target.run) for target in targets]
        for target in targets:
            stack.callback(target.stop)
        yield
        stack.close()
        for future in futures:
            future.result()


def _read(targets: Sequence[BusyTarget]) -> list[Reading]:
    """Of all targets, from the same report of the pool: the first that is new to all."""
    before = [target.load() for target in targets]
    end = time.perf_counter() + PATIENCE
    while time.perf_counter() < end:
        loads = [target.load() for target in targets]
        if all(load is not None and load is not old for load, old in zip(loads, before, strict=True)):
            now = time.perf_counter()
            return [Reading(now, load, t.tokens) for load, t in zip(loads, targets, strict=True) if load is not None]
        time.sleep(0.001)
    raise EngineError(f"a target has not heard of its pool for {PATIENCE:g} s")


def sharing_of(
    readings: Sequence[Sequence[Reading]], weights: Sequence[int], leaves: int, tolerance: float
) -> WeightedSharing:
    """`readings` at the ends of windows, each of all targets."""
    windows = [_window(*pair, leaves) for pair in pairwise(readings)]
    tenants = [_tenant(i, weight, windows) for i, weight in enumerate(weights)]
    wanted = [weight / weights[-1] for weight in weights]
    near = (abs(one.rows_to_last.median / want - 1) <= tolerance for one, want in zip(tenants, wanted, strict=True))
    return WeightedSharing(tenants, Spread.of([window.filled for window in windows]), tolerance, all(near))


def _window(before: Sequence[Reading], after: Sequence[Reading], leaves: int) -> _Window:
    pairs = list(zip(before, after, strict=True))
    seconds = after[0].at - before[0].at
    rows = [b.load.own_rows - a.load.own_rows for a, b in pairs]
    levels = seconds / (after[0].load.step_ms / 1000)
    return _Window(seconds, rows, [b.tokens - a.tokens for a, b in pairs], sum(rows) / levels / leaves)


def _tenant(index: int, weight: int, windows: Sequence[_Window]) -> TenantSpeed:
    return TenantSpeed(
        weight,
        Spread.of([window.rows[index] / window.seconds for window in windows]),
        Spread.of([window.rows[index] / window.rows[-1] for window in windows]),
        Spread.of([window.tokens[index] / window.seconds for window in windows]),
    )
