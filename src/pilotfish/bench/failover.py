"""Streams over two pools, of which one is killed: what becomes of those that it served, and of the others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from pilotfish.bench.budget import Workload
from pilotfish.bench.compare import Spread
from pilotfish.bench.pools import Listener
from pilotfish.bench.streams import Streams, Window
from pilotfish.config import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.errors import EngineError

#: Seconds within which the sessions of a dead pool have to be elsewhere.
PATIENCE = 30.0
PHASES = ("before", "moving", "after")
GROUPS = ("others", "moved")


@dataclass(frozen=True)
class Kill:
    """One run. Tokens/s of a stream group in each of PHASES: `moving` is from the kill until all have moved."""

    seconds_to_move: float
    streams: dict[str, int]  # of each group
    tokens_per_second: dict[str, list[float]]  # by group, in order of PHASES

    def kept(self, phase: str) -> float:
        """Of the others' speed before the kill, the share that they have in a phase."""
        speeds = self.tokens_per_second["others"]
        return speeds[PHASES.index(phase)] / speeds[0]


@dataclass(frozen=True)
class GroupSpeed:
    """Streams of one group in one phase: others, whose pool lives, or moved ones."""

    group: str
    phase: str
    streams: Spread
    tokens_per_second: Spread


@dataclass(frozen=True)
class Failover:
    seconds_to_move: Spread
    groups: list[GroupSpeed]
    kept_while_moving: Spread  # tokens/s of the others over those before, kill by kill
    kept_after: Spread
    tolerance: float
    holds: bool  # neither median is lower than that


def measure_kill(config: EngineConfig, workload: Workload, streams: int, victim: Listener, seconds: float) -> Kill:
    """`config` is attached to several pools, the victim among them, which ends in this."""
    with Engine(config) as engine:
        running = Streams(engine, workload, streams)
        running.run_for(seconds)  # to warm up
        before = running.run_for(seconds)
        running.run(lambda: None not in pools_of(engine, running))
        doomed = victim.told["endpoint"]
        groups = groups_of(pools_of(engine, running), doomed)
        victim.close()
        end = time.perf_counter() + PATIENCE
        moving = running.run(lambda: _moved(pools_of(engine, running), doomed) or time.perf_counter() > end)
        if time.perf_counter() > end:
            raise EngineError(f"the sessions of a dead pool have not moved within {PATIENCE:g} s")
        after = running.run_for(seconds)
    return kill_of(groups, [before, moving, after])


def _moved(pools: Sequence[str | None], doomed: str) -> bool:
    return None not in pools and doomed not in pools


def groups_of(pools: Sequence[str | None], doomed: str) -> dict[str, list[int]]:
    """Numbers of the streams in each of GROUPS, by each stream's pool; EngineError where a group has none."""
    numbers = range(len(pools))
    groups = {"others": [i for i in numbers if pools[i] != doomed], "moved": [i for i in numbers if pools[i] == doomed]}
    if not all(groups.values()):
        raise EngineError(f"{len(pools)} streams are not spread over both pools")
    return groups


def pools_of(engine: Engine, streams: Streams) -> list[str | None]:
    """Names of the pools that draft for each stream; None: nobody does."""
    assert engine.remote is not None
    pools = map(engine.remote.drafter.pool_of, streams.requests)
    return [None if pool is None else pool.name for pool in pools]


def kill_of(groups: dict[str, list[int]], windows: Sequence[Window]) -> Kill:
    """`windows` in order of PHASES; `groups` by name, with the numbers of their streams."""
    speeds = {name: [window.rate(streams) for window in windows] for name, streams in groups.items()}
    return Kill(windows[1].seconds, {name: len(streams) for name, streams in groups.items()}, speeds)


def failover_of(kills: Sequence[Kill], tolerance: float) -> Failover:
    """At least one kill."""
    moving, after = (Spread.of([kill.kept(phase) for kill in kills]) for phase in PHASES[1:])
    return Failover(
        Spread.of([kill.seconds_to_move for kill in kills]),
        [_group(kills, group, phase) for group in GROUPS for phase in PHASES],
        moving,
        after,
        tolerance,
        holds=min(moving.median, after.median) >= 1 - tolerance,
    )


def _group(kills: Sequence[Kill], group: str, phase: str) -> GroupSpeed:
    speeds = [kill.tokens_per_second[group][PHASES.index(phase)] for kill in kills]
    return GroupSpeed(group, phase, Spread.of([kill.streams[group] for kill in kills]), Spread.of(speeds))
