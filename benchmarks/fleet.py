"""Fleets of 1 to 1,000 targets at the same load for each, simulated: policies of routing side by side. No model."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from fleets.baselines import PowerOfTwo, RoundRobin
from fleets.fleet import simulate
from fleets.fleet_figures import FleetFigures, Quantiles
from fleets.fleet_plan import BUNDLED_PAIR, FleetPlan, draft_of, prefill_of, target_of
from fleets.traffic import ConversationTraffic, RecordedRequest, RecordedTraffic, SimulatedRequest
from harness import Options, run

from pilotfish.cli.bench.report import ProgressBar, Report, Row
from pilotfish.config.hardware.cost import place
from pilotfish.core.routing.router import Router
from pilotfish.errors import ParameterError
from pilotfish.plan.trace import BLOCK_TOKENS, read_trace

ROUTINGS: dict[str, Callable[[], Router]] = {"round-robin": RoundRobin, "power-of-two": PowerOfTwo, "prefix": Router}
#: Of the time, before anything counts: caches are empty at first.
WARM_UP = 1 / 3
#: Leaves of a draft's level.
LEAVES = 64


def run_fleet(options: Options, progress: ProgressBar) -> Report:
    counts, policies = options.targets, policies_of(options.routings)
    traffic, plan_of_targets = traffic_of(options), plan_of(options)
    progress.total = len(counts) * len(policies)
    fleets = list[Row]()
    for count in sorted(counts):
        plan = plan_of_targets(count)
        for name, routing in policies.items():
            progress.note(f"{count} targets, {name}")
            began = time.perf_counter()
            figures = simulate(plan, traffic(count), routing)
            fleets.append(row_of(count, name, figures, time.perf_counter() - began))
            progress(f"{count} targets, {name}")
    return Report({"fleets": fleets})


def policies_of(names: Sequence[str]) -> dict[str, Callable[[], Router]]:
    if unknown := set(names) - set(ROUTINGS):
        raise ParameterError("routings", min(unknown), f"some of {', '.join(ROUTINGS)}")
    return {name: ROUTINGS[name] for name in names}


def traffic_of(options: Options) -> Callable[[int], Iterable[SimulatedRequest]]:
    """For so many targets."""
    rate, seconds = options.rate, options.seconds
    if not options.trace:
        return lambda targets: ConversationTraffic(
            rate=rate * targets, seconds=seconds, tenants=options.tenants, system_tokens=options.shared
        )
    trace = [
        RecordedRequest(one.timestamp / 1000, one.input_length, one.output_length, tuple(one.hash_ids))
        for one in read_trace(Path(options.trace))
    ]
    own = len(trace) / max(trace[-1].at, 1e-3)
    return lambda targets: RecordedTraffic(trace, rate * targets / own, seconds, BLOCK_TOKENS)


def plan_of(options: Options) -> Callable[[int], FleetPlan]:
    """For so many targets."""
    placed, draft = place(options.target_device), place(options.pool_device)
    target = target_of(placed, max_rows=options.max_rows, max_requests=options.max_requests, acceptance=BUNDLED_PAIR)
    plan = FleetPlan(targets=1, target=target, draft=draft_of(draft, LEAVES), warm_up=WARM_UP * options.seconds)
    if options.per_prefill:
        plan = replace(plan, prefill=prefill_of(placed))
    return lambda targets: replace(
        plan,
        targets=targets,
        servers=math.ceil(targets / options.per_server),
        draft_pools=math.ceil(targets / options.per_pool),
        prefill_workers=math.ceil(targets / options.per_prefill) if options.per_prefill else 0,
    )


def row_of(targets: int, name: str, figures: FleetFigures, seconds: float) -> Row:
    return {
        "targets": targets,
        "routing": name,
        "requests": figures.requests,
        "refused": figures.refused,
        **_milliseconds("first_token_ms", figures.first_token),
        **_milliseconds("gap_ms", figures.gaps),
        "token_ms_p50": 1000 * figures.token.p50,
        "tokens_per_s": figures.tokens,
        "hit_rate": figures.hit_rate,
        "predicted": figures.predicted,
        "targets_busy": figures.busy_targets,
        "busiest": figures.busiest_target,
        "servers": figures.busy_servers,
        "drafts": figures.busy_drafts,
        "prefills": figures.busy_prefills,
        "seconds": seconds,
    }


def _milliseconds(name: str, of: Quantiles) -> Row:
    return {f"{name}_{share}": 1000 * getattr(of, share) for share in ("p50", "p95", "p99")}


if __name__ == "__main__":
    run(
        run_fleet,
        targets=[1, 3, 10, 30, 100, 300, 1000],
        routings=["round-robin", "power-of-two", "prefix"],
        rate=0.5,
        seconds=1800.0,
        shared=512,
        tenants=1,
        trace="",
        target_device="llama-3.1-70b@h200x4",
        pool_device="llama-3.2-1b@h200",
        per_server=20,
        per_pool=4,
        per_prefill=0,
        max_rows=2048,
        max_requests=64,
    )
