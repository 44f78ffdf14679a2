"""What a fleet is made of: numbers of targets, servers and pools, and what each can do, by the cost model or a pace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pilotfish.core.budget import BUCKETS
from pilotfish.plan.cost import BFLOAT16, KV_SHARE, DenseModel, Device, step_seconds
from pilotfish.plan.pace import Pace
from pilotfish.plan.simulated_pools import Acceptance, DraftPlan, PrefillPlan
from pilotfish.plan.simulated_server import ServerPlan
from pilotfish.plan.simulated_target import NO_GUESSES, Guessing, TargetPlan

#: Of a device's memory, what KV can have beside the weights.
KV_MEMORY = 0.9
#: Seconds between two forwards of a target with many sequences, and between two levels of a draft (docs/benchmarks.md,
#: Async, at 32 sequences).
HOST, LEVEL_HOST = 1.9e-3, 0.35e-3
#: What sequences of the bundled pair gain a step at T=0.8, by the nodes verified of each (docs/benchmarks.md, Async: at
#: 32, 8 and 1 at a time), and an assumed spread.
BUNDLED_PAIR = Acceptance(gains=((1, 0.54), (4, 1.76), (16, 2.48)), spread=0.3)
#: Of a server's core (docs/benchmarks.md, Fleet).
SERVER = ServerPlan(request_seconds=2e-3, token_seconds=0.5e-6, event_seconds=0.11e-3, most=1 << 20)


@dataclass(frozen=True, kw_only=True)
class FleetPlan:
    targets: int
    target: TargetPlan
    servers: int = 1
    server: ServerPlan = SERVER
    acceptance: Acceptance = BUNDLED_PAIR
    draft_pools: int = 0
    draft: DraftPlan | None = None  # None: nobody guesses
    prefill_workers: int = 0
    prefill: PrefillPlan | None = None
    warm_up: float = 0.0  # seconds before anything counts
    seed: int = 0


def target_of(
    model: DenseModel,
    device: Device,
    count: int,
    *,
    max_rows: int,
    max_requests: int,
    acceptance: Acceptance | None,
    mean_context: int = 4096,
) -> TargetPlan:
    """A target of so many devices. Guesses are as many as pay where sequences have `mean_context` tokens; without
    `acceptance` there are none."""
    seconds = [step_seconds(model, device, count, rows, 0) for rows in range(max_rows + 1)]
    kv_bytes = model.kv_values * BFLOAT16
    context_seconds = kv_bytes / (device.bandwidth * KV_SHARE) / count
    free = count * device.memory * KV_MEMORY - model.parameters * BFLOAT16
    return paced_target(
        seconds, context_seconds, int(free / kv_bytes), max_requests, acceptance, mean_context * context_seconds
    )


def paced_target(
    seconds: list[float],
    context_seconds: float,
    slots: int,
    max_requests: int,
    acceptance: Acceptance | None = None,
    sequence_seconds: float = 0.0,
    host_seconds: float = HOST,
) -> TargetPlan:
    """A target whose forwards take `seconds` by their rows, and `sequence_seconds` more for the mean sequence."""
    guessing = [NO_GUESSES] * (max_requests + 1)
    if acceptance is not None:
        costs = np.array(seconds) + host_seconds
        guessing = [_guessing(n, costs + n * sequence_seconds, acceptance) for n in range(max_requests + 1)]
    return TargetPlan(seconds, context_seconds, host_seconds, slots, max_requests, guessing)


def _guessing(sequences: int, costs: np.ndarray, acceptance: Acceptance) -> Guessing:
    """What `core/budget.py` would choose: most tokens a second."""
    most = (len(costs) - 1) / max(sequences, 1) - 1
    choices = [nodes for nodes in BUCKETS if nodes <= min(most, acceptance.gains[-1][0])]
    best = max(choices, key=lambda nodes: (1 + acceptance.gain(nodes)) / costs[sequences * (1 + nodes)], default=0)
    return Guessing(float(best), 1 + acceptance.gain(best))


def draft_of(model: DenseModel, device: Device, leaves: int) -> DraftPlan:
    """A draft on one device, whose levels expand so many leaves."""
    level = step_seconds(model, device, 1, leaves, 0) + LEVEL_HOST
    kv_bytes = model.kv_values * BFLOAT16
    slots = int((device.memory * KV_MEMORY - model.parameters * BFLOAT16) / kv_bytes)
    chunk = 2048
    return DraftPlan(leaves / level, slots, step_seconds(model, device, 1, chunk, 0) / chunk)


def prefill_of(target: TargetPlan, rows: int, least: int, transfer_seconds: float) -> PrefillPlan:
    """A worker as fast as a target."""
    return PrefillPlan(target.seconds[rows] / rows, transfer_seconds, least)


def forwards_at(pace: Pace, max_rows: int) -> list[float]:
    """Seconds of a paced forward, by rows."""
    return [pace.seconds(max(rows, 1)) for rows in range(max_rows + 1)]
