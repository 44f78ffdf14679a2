"""Fleets of 1 to 1,000 targets at the same load for each, simulated: policies of routing side by side, and what a
server and a draft pool have to do as the fleet grows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from pilotfish.bench.fleet_limits import ServerLoad, limits_of, on_paper, row_of_load, server_load
from pilotfish.bench.options import BenchOptions
from pilotfish.bench.report import ProgressBar, Report, Row, cpu_name
from pilotfish.bench.server_costs import FollowCosts, follow_costs
from pilotfish.bench.workload import parse_numbers
from pilotfish.config.hardware.cost import place
from pilotfish.core.routing.router import PowerOfTwo, RoundRobin, Router, Routing
from pilotfish.errors import ParameterError
from pilotfish.plan.fleets.fleet import simulate
from pilotfish.plan.fleets.fleet_figures import FleetFigures, Quantiles
from pilotfish.plan.fleets.fleet_plan import BUNDLED_PAIR, FleetPlan, draft_of, prefill_of, target_of
from pilotfish.plan.fleets.traffic import ConversationTraffic, RecordedRequest, RecordedTraffic, SimulatedRequest
from pilotfish.plan.trace import BLOCK_TOKENS, TracedRequest, read_trace

ROUTINGS: dict[str, Callable[[], Routing]] = {"round-robin": RoundRobin, "power-of-two": PowerOfTwo, "prefix": Router}
#: Of the time, before anything counts: caches are empty at first.
WARM_UP = 1 / 3
#: Leaves of a draft's level.
LEAVES = 64
#: Fleets beyond those simulated, for which a server's load is computed from that of the largest.
ON_PAPER = (3_000, 10_000)


def run_fleet(options: BenchOptions, progress: ProgressBar) -> Report:
    """What limits a fleet is of the last policy."""
    counts, policies = parse_numbers("targets", options.target_counts), policies_of(options.routings)
    traffic, plan_of_targets = traffic_of(options), plan_of(options)
    progress.total = len(counts) * len(policies)
    fleets, loads = list[Row](), list[Row]()
    for count in sorted(counts):
        plan = plan_of_targets(count)
        for name, routing in policies.items():
            progress.note(f"{count} targets, {name}")
            began = time.perf_counter()
            figures = simulate(plan, traffic(count), routing)
            fleets.append(row_of(count, name, figures, time.perf_counter() - began))
            progress(f"{count} targets, {name}")
        costs = follow_costs(count)
        load = server_load(plan, figures, costs)
        loads.append(row_of_load(count, plan.servers, True, load, figures.keys_told * costs.key_bytes))
    loads += [_on_paper(plan, figures, costs, load, count) for count in ON_PAPER if count > plan.targets]
    results = {"fleets": fleets, "one_server": loads, "limits": limits_of(plan, figures, load)}
    return Report({**results, "decision_us": 1e6 * costs.decision, "cpu": cpu_name()})


def policies_of(text: str) -> dict[str, Callable[[], Routing]]:
    names = text.split(",")
    if not set(names) <= set(ROUTINGS):
        raise ParameterError("routings", text, f"{', '.join(ROUTINGS)}, separated by commas")
    return {name: ROUTINGS[name] for name in names}


def _on_paper(plan: FleetPlan, figures: FleetFigures, costs: FollowCosts, load: ServerLoad, targets: int) -> Row:
    times = targets / plan.targets
    more = on_paper(load, times)
    return row_of_load(targets, round(plan.servers * times), False, more, figures.keys_told * times * costs.key_bytes)


def traffic_of(options: BenchOptions) -> Callable[[int], Iterable[SimulatedRequest]]:
    """For so many targets."""
    rate, seconds = options.rate, options.seconds
    if not options.trace:
        return lambda targets: ConversationTraffic(
            rate=rate * targets, seconds=seconds, tenants=options.tenants, system_tokens=options.shared
        )
    trace = [
        RecordedRequest(one.timestamp / 1000, one.input_length, one.output_length, tuple(one.hash_ids))
        for one in read_trace(Path(options.trace), TracedRequest)
    ]
    own = len(trace) / max(trace[-1].at, 1e-3)
    return lambda targets: RecordedTraffic(trace, rate * targets / own, seconds, BLOCK_TOKENS)


def plan_of(options: BenchOptions) -> Callable[[int], FleetPlan]:
    """For so many targets."""
    placed, draft = place(options.target_device), place(options.pool_device)
    target = target_of(
        placed,
        max_rows=options.engine["max_rows"],
        max_requests=options.engine["max_requests"],
        acceptance=BUNDLED_PAIR,
    )
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
