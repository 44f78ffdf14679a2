"""Tokens per second with a draft pool at a distance, beside plain decoding: a proxy stands for the network."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from draft_pools import attached, drafted_by, pools_beside, start_proxy
from harness import PAIR, Options, compete, run

from pilotfish.cli.bench.contestants import OFF, PLAIN, Run, over, speed_of
from pilotfish.cli.bench.report import ProgressBar, Report
from pilotfish.engine.engine import Engine

#: The least share of plain decoding's speed that a draft may leave, at any distance.
FLOOR = 0.98


def run_network(options: Options, progress: ProgressBar) -> Report:
    """Runs every prompt in `repeats` rounds after one to warm up."""
    round_trips = options.round_trips
    jobs = options.rounds(len(options.rows()))
    progress.total = (len(round_trips) + 1) * len(jobs) * len(jobs[0])
    with ExitStack() as stack:
        (pool,), config = stack.enter_context(pools_beside(options.engine_config(mode="off")))
        engine = stack.enter_context(Engine(config))
        contestants = {OFF: PLAIN}
        for round_trip in round_trips:
            endpoint = stack.enter_context(start_proxy(pool, round_trip, options.mbit)).told["endpoint"]
            remote = stack.enter_context(attached(engine, endpoint))
            contestants[f"{round_trip:g} ms"] = drafted_by(engine, remote.drafter)
        rounds = compete(engine, contestants, jobs, options.concurrency, progress)
        [load] = [one.load for one in remote.pools]
    return Report({**distances_of(rounds), "level_ms": 0.0 if load is None else load.step_ms})


def distances_of(rounds: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Plain decoding, then every round trip, over plain decoding and over the nearest."""
    nearest = list(rounds)[1]
    distances = [speed_of(name, rounds) | {"over_nearest": over(name, nearest, rounds)} for name in rounds]
    holds = all(row["over_off"].median >= FLOOR for row in distances)
    return {"distances": distances, "floor": FLOOR, "holds": holds}


if __name__ == "__main__":
    run(
        run_network,
        *PAIR,
        "concurrency",
        "nodes",
        "leaves",
        "budget",
        pace="target=10.4ms,draft=2.6ms",
        round_trips=[0.0, 1.0, 5.0, 15.0, 50.0],
        mbit=100.0,
        repeats=5,
    )
