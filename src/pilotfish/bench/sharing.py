"""Several targets on one pool, and one target on several pools."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pilotfish.bench.budget import Workload
from pilotfish.bench.failover import Failover, GroupSpeed, Kill, failover_of, measure_kill
from pilotfish.bench.machine import Machine, describe_machine
from pilotfish.bench.pools import on_target_cores, place, start_pool
from pilotfish.bench.report import print_table
from pilotfish.bench.weights import BusyTarget, Keys, WeightedSharing, measure_sharing
from pilotfish.config import EngineConfig

#: What shares may differ from the weights, and what a dead pool may cost the streams of another.
TOLERANCE = 0.1


@dataclass(frozen=True)
class SharingReport:
    machine: Machine
    target: str
    draft: str
    dtype: str
    pace: str
    prompts: int
    temperature: float
    max_tokens: int
    streams: int  # of each target
    seconds: float
    repeats: int
    leaves: int
    budget: str
    sharing: WeightedSharing
    failover: Failover


def run_sharing(
    config: EngineConfig,
    workload: Workload,
    weights: list[int],
    streams: int,
    seconds: float,
    repeats: int,
    machine: Machine | None = None,
    done: Callable[[str], None] = lambda _: None,
) -> SharingReport:
    """`config` is of mode off, with a draft; `weights` of two tenants or more. `machine` is probed unless given. `done`
    is called with a label for each window."""
    machine = machine or describe_machine(config.dtype)
    with ExitStack() as stack:
        keys = Keys.write(Path(stack.enter_context(tempfile.TemporaryDirectory())), weights)
        sharing = _share(config, workload, keys, streams, seconds, repeats, partial(done, "sharing"))
        kills: list[Kill] = []
        for _ in range(repeats):
            kills.append(_kill(config, workload, keys, streams, seconds))
            done("killing")
    return SharingReport(
        machine=machine,
        target=str(config.target),
        draft=str(config.draft),
        dtype=config.dtype,
        pace=config.pace,
        prompts=len(workload.prompts),
        temperature=workload.temperature,
        max_tokens=workload.max_tokens,
        streams=streams,
        seconds=seconds,
        repeats=repeats,
        leaves=config.leaves,
        budget=config.budget,
        sharing=sharing,
        failover=failover_of(kills, TOLERANCE),
    )


def num_windows(repeats: int) -> int:
    """How often `run_sharing` calls `done`."""
    return 2 * repeats + 1


def _share(
    config: EngineConfig,
    workload: Workload,
    keys: Keys,
    streams: int,
    seconds: float,
    repeats: int,
    done: Callable[[], None],
) -> WeightedSharing:
    placement = place(1)
    with start_pool(config, placement.drafts[0], keys.pool_options) as pool:
        target = partial(keys.target, on_target_cores(config, placement), endpoints=[pool.told["endpoint"]])
        targets = [BusyTarget(target(tenant), workload, streams) for tenant in range(len(keys.weights))]
        return measure_sharing(targets, keys.weights, config.leaves, seconds, repeats, TOLERANCE, done)


def _kill(config: EngineConfig, workload: Workload, keys: Keys, streams: int, seconds: float) -> Kill:
    """Of the second of two fresh pools."""
    placement = place(2)
    with ExitStack() as stack:
        pools = [stack.enter_context(start_pool(config, cores, keys.pool_options)) for cores in placement.drafts]
        endpoints = [pool.told["endpoint"] for pool in pools]
        target = keys.target(on_target_cores(config, placement), 0, endpoints)
        return measure_kill(target, workload, streams, pools[1], seconds)


def print_sharing(report: SharingReport) -> None:
    sharing, failover = report.sharing, report.failover
    size = f"{report.streams} streams of {report.max_tokens} tokens each, T={report.temperature:g}"
    windows = f"{report.repeats} x {report.seconds:g} s, budget {report.budget}"
    title = f"{report.target}, {report.dtype}, paced {report.pace or 'not'}, {size}, {windows}"
    columns = ("weight", "rows/s: median (quartiles)", "rows to the last", "tokens/s")
    rows = [
        (t.weight, t.rows_per_second, r, t.tokens_per_second)
        for t, r in zip(sharing.tenants, sharing.ratios, strict=True)
    ]
    print_table(f"{title}; targets that share a pool", columns, rows)
    verdict = f"within {sharing.tolerance:.0%} of the weights: {_yes(sharing.holds)}"
    print_table("", ("", ""), [(verdict, f"of {report.leaves} leaves a level, {sharing.filled} were taken")])
    columns = ("streams", "when", "number", "tokens/s: median (quartiles)")
    print_table("one of two pools is killed", columns, map(_group_row, failover.groups))
    kept = f"kept by the others: {failover.kept_while_moving} while moving, {failover.kept_after} after"
    verdict = f"the others keep {1 - failover.tolerance:.0%}: {_yes(failover.holds)}"
    print_table("", ("", "", ""), [(verdict, kept, f"moved within {failover.seconds_to_move} s")])


def _group_row(group: GroupSpeed) -> Sequence[object]:
    return (group.group, group.phase, f"{group.streams.median:g}", group.tokens_per_second)


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"
