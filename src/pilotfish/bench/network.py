"""Async against off, with a network of some delay between target and draft pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from pilotfish.bench.budget import Contestant, Run, Workload, run_jobs
from pilotfish.bench.compare import Spread, pairwise_ratios
from pilotfish.bench.drafters import JobRunner
from pilotfish.bench.machine import Machine, describe_machine
from pilotfish.bench.pools import attached, on_target_cores, place, proxied, start_pool, start_proxy
from pilotfish.bench.quantization import equal_outputs
from pilotfish.bench.report import print_bars, print_table
from pilotfish.bench.watched import WatchedBudget
from pilotfish.config import EngineConfig
from pilotfish.core.budget import AdaptiveBudget, Budget, FixedBudget
from pilotfish.core.drafter import NoDrafter
from pilotfish.engine.costs import make_budget
from pilotfish.engine.engine import Engine
from pilotfish.engine.remote_drafts import RemoteDrafts
from pilotfish.target.remote import RemoteDrafter

OFF = "off"
#: What a draft at any distance may cost: the least share of plain decoding's speed.
FLOOR = 0.98


@dataclass(frozen=True)
class Network:
    """The networks to try."""

    round_trips: list[float]  # milliseconds, ascending
    mbit: float  # Mbit/s in each direction


@dataclass(frozen=True)
class Distance:
    """One contestant: tokens of all sequences a second, prompts' forwards included."""

    name: str
    round_trip_ms: float | None  # None: plain decoding
    tokens_per_second: Spread
    over_off: Spread  # round by round
    over_nearest: Spread  # over the shortest round trip's, round by round
    tokens_per_verify_step: float
    hit_share: float  # of the steps, those after which a tree was left
    equal_outputs: float  # share of the outputs that are those of plain decoding


@dataclass(frozen=True)
class NetworkReport:
    machine: Machine
    target: str
    draft: str
    dtype: str
    pace: str
    mbit: float
    prompts: int
    temperature: float
    max_tokens: int
    concurrency: int
    repeats: int
    nodes: int
    budget: str
    distances: list[Distance]
    level_ms: float  # of a level of the draft, at the end
    overruns: float  # share of the target's forwards that took longer than their pace
    floor: float
    holds: bool  # no median of `over_off` is below the floor


@dataclass(frozen=True)
class Player:
    """A contestant, and the budget whose clock stands still while others run."""

    contestant: Contestant
    watched: WatchedBudget | None = None


#: Runs of each contestant in order of rounds.
Rounds = dict[str, list[Run]]


def run_network(
    config: EngineConfig,
    workload: Workload,
    network: Network,
    concurrency: int,
    repeats: int,
    machine: Machine | None = None,
    done: Callable[[str], None] = lambda _: None,
) -> NetworkReport:
    """`config` is of mode off, with a draft. `repeats` rounds of every prompt after one to warm up. `machine` is probed
    unless given. `done` is called with a label for each sequence."""
    placement = place(1)
    with ExitStack() as stack:
        pool = stack.enter_context(start_pool(config, placement.drafts[0]))
        engine = stack.enter_context(Engine(on_target_cores(config, placement)))
        proxy = start_proxy(pool.told["endpoint"], network.round_trips, network.mbit, placement.drafts[0])
        endpoints = proxied(stack.enter_context(proxy))
        remotes = [stack.enter_context(attached(engine, [endpoint])) for endpoint in endpoints]
        machine = machine or describe_machine(config.dtype)
        players = _players(engine, network, remotes, concurrency)
        engine.reset_pacing()  # what the budgets have measured is no part of the run
        rounds = _measure(engine, players, workload, concurrency, repeats, done)
        distances = distances_of(network.round_trips, rounds)
        [load] = [pool.load for pool in remotes[0].pools]
        return NetworkReport(
            machine=machine,
            target=str(config.target),
            draft=str(config.draft),
            dtype=config.dtype,
            pace=config.pace,
            mbit=network.mbit,
            prompts=len(workload.prompts),
            temperature=workload.temperature,
            max_tokens=workload.max_tokens,
            concurrency=concurrency,
            repeats=repeats,
            nodes=config.nodes,
            budget=config.budget,
            distances=distances,
            level_ms=0.0 if load is None else load.step_ms,
            overruns=max((pacing.share for pacing in engine.pacing()), default=0.0),
            floor=FLOOR,
            holds=all(distance.over_off.median >= FLOOR for distance in distances),
        )


def num_sequences(workload: Workload, network: Network, repeats: int) -> int:
    """How many sequences `run_network` generates, warm-up included."""
    return (len(network.round_trips) + 1) * (repeats + 1) * workload.num_jobs(1)


def name_of(round_trip: float) -> str:
    return f"{round_trip:g} ms"


def _players(engine: Engine, network: Network, remotes: Sequence[RemoteDrafts], concurrency: int) -> dict[str, Player]:
    players = {OFF: Player(Contestant(NoDrafter(), FixedBudget(1, 1)))}  # of which nothing is drafted
    for round_trip, remote in zip(network.round_trips, remotes, strict=True):
        players[name_of(round_trip)] = _player(engine, remote.drafter, concurrency)
    return players


def _player(engine: Engine, drafter: RemoteDrafter, concurrency: int) -> Player:
    budget: Budget = make_budget(engine.config, engine.worker.executor, drafter)
    if not isinstance(budget, AdaptiveBudget):
        return Player(Contestant(drafter, budget))
    watched = WatchedBudget(budget, concurrency)
    return Player(Contestant(drafter, watched), watched)


def _measure(
    engine: Engine,
    players: dict[str, Player],
    workload: Workload,
    concurrency: int,
    repeats: int,
    done: Callable[[str], None],
) -> Rounds:
    """One round to warm up, then `repeats`, in which contestants take turns in going first."""
    bench, names = JobRunner(engine), list(players)
    rounds: Rounds = {name: [] for name in names}
    for turn in range(repeats + 1):
        jobs, first = workload.jobs(1, turn), turn % len(names)
        for name in (*names[first:], *names[:first]):
            player = players[name]
            if player.watched is not None:
                player.watched.begin_run()
            run = run_jobs(bench, player.contestant, jobs, concurrency, partial(done, name))
            if turn > 0:
                rounds[name].append(run)
    return rounds


def distances_of(round_trips: Sequence[float], rounds: Rounds) -> list[Distance]:
    """Plain decoding, then every round trip."""
    nearest = rounds[name_of(round_trips[0])]
    names = [(OFF, None), *((name_of(round_trip), round_trip) for round_trip in round_trips)]
    return [distance_of(name, far, rounds[name], rounds[OFF], nearest) for name, far in names]


def distance_of(
    name: str, round_trip: float | None, runs: Sequence[Run], plain: Sequence[Run], nearest: Sequence[Run]
) -> Distance:
    speeds, off, near = ([run.tokens_per_second for run in of] for of in (runs, plain, nearest))
    stats = [sample.request.stats for run in runs for sample in run.samples]
    steps, hits = sum(one.verify_steps for one in stats), sum(one.hits for one in stats)
    equal = [equal_outputs(run.samples, other.samples) for run, other in zip(runs, plain, strict=True)]
    return Distance(
        name,
        round_trip,
        Spread.of(speeds),
        Spread.of(pairwise_ratios(speeds, off)),
        Spread.of(pairwise_ratios(speeds, near)),
        tokens_per_verify_step=sum(len(sample.token_ids) for run in runs for sample in run.samples) / steps,
        hit_share=hits / steps,
        equal_outputs=sum(equal) / len(equal),
    )


def print_network(report: NetworkReport) -> None:
    tree = f"up to {report.nodes} nodes, budget {report.budget}, {report.mbit:g} Mbit/s"
    size = f"{report.prompts} prompts x {report.repeats}, {report.concurrency} at a time, T={report.temperature:g}"
    columns = ("round trip", "tokens/s: median (quartiles)", "over off", "over the nearest")
    more = ("tokens/verify step", "hits", "outputs as off")
    print_table(f"{report.target}, {report.dtype}, {size}, {tree}", (*columns, *more), map(_row, report.distances))
    medians = {distance.name: distance.tokens_per_second.median for distance in report.distances}
    print_bars(("round trip", "tokens/s", "┃ off"), medians, mark=medians[OFF])
    columns = (f"never below {report.floor:g} of off", "paced", "overruns of the target", "ms of a draft's level")
    ends = (report.pace or "no", f"{report.overruns:.1%}", f"{report.level_ms:.2f}")
    print_table("", columns, [("yes" if report.holds else "no", *ends)])


def _row(distance: Distance) -> tuple[object, ...]:
    ratios = (distance.over_off, distance.over_nearest)
    ends = (f"{distance.tokens_per_verify_step:.2f}", f"{distance.hit_share:.0%}", f"{distance.equal_outputs:.0%}")
    return (distance.name, distance.tokens_per_second, *ratios, *ends)
