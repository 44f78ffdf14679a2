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
from pilotfish.bench.weights import BusyTarget, Keys, TenantSpeed, WeightedSharing, measure_sharing
from pilotfish.config import EngineConfig
from pilotfish.errors import ParameterError

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
    if len(weights) < 2:
        raise ParameterError("weights", weights, "those of two targets or more")
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
    paced = f"paced {report.pace}" if report.pace else "not paced"
    size = f"{report.streams} streams, T={report.temperature:g}, {report.repeats} x {report.seconds:g} s"
    columns = ("weight", "rows/s: median (quartiles)", "rows over the last's", "tokens/s")
    print_table(f"{report.target}, {report.dtype}, {paced}, {size}", columns, map(_tenant_row, sharing.tenants))
    verdict = (f"within {sharing.tolerance:.0%} of the weights", "leaves of a level", "taken of them")
    print_table("", verdict, [(_yes(sharing.holds), report.leaves, sharing.filled)])
    columns = ("streams", "when a pool is killed", "number", "tokens/s: median (quartiles)")
    print_table("one target on two pools, of which one is killed", columns, map(_group_row, failover.groups))
    columns = ("seconds to move", "others while moving", "after", f"at least {1 - failover.tolerance:.0%}")
    kept = (failover.kept_while_moving, failover.kept_after)
    print_table("", columns, [(failover.seconds_to_move, *kept, _yes(failover.holds))])


def _tenant_row(tenant: TenantSpeed) -> Sequence[object]:
    return (tenant.weight, tenant.rows_per_second, tenant.rows_to_last, tenant.tokens_per_second)


def _group_row(group: GroupSpeed) -> Sequence[object]:
    return (group.group, group.phase, f"{group.streams.median:g}", group.tokens_per_second)


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"
