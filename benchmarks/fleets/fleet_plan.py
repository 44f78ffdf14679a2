"""Plans of fleets: numbers of targets, servers and pools, and their speeds by the cost model or a pace."""

from dataclasses import dataclass

import numpy as np

from fleets.simulated_pools import NO_GUESSES, Acceptance, DraftPlan, Guessing, PrefillPlan
from fleets.simulated_server import ServerPlan
from fleets.simulated_target import TargetPlan
from pilotfish.config.hardware.cost import ForwardLoad, PlacedModel
from pilotfish.config.hardware.tables import PILOTFISH
from pilotfish.core.scheduling.budget import BUCKETS
from pilotfish.plan.planner.load import CHUNK, EXPOSED

#: Tokens of a sequence for which a target's guesses are chosen.
CONTEXT = 4096
#: Bytes a second between prefill workers and targets: 400 Gbit/s.
LINK = 50e9
#: Seconds between two forwards of a target with many sequences, and between two levels of a draft.
HOST, LEVEL_HOST = PILOTFISH.step.value, PILOTFISH.level.value
#: Tokens that sequences of the bundled pair gain a step at T=0.8, by the nodes verified of each (docs/benchmarks.md,
#: Async: at 32, 8 and 1 at a time), and an assumed spread.
BUNDLED_PAIR = Acceptance(gains=((1, 0.54), (4, 1.76), (16, 2.48)), spread=0.3)
#: Of a server's core, as measured (docs/benchmarks.md, Fleets).
SERVER = ServerPlan(
    request_seconds=0.8e-3,
    token_seconds=3.3e-6,
    event_seconds=0.05e-3,
    frame_seconds=0.12e-3,
    hear_seconds=0.05e-3,
    most=1 << 20,
)


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


def target_of(placed: PlacedModel, *, max_rows: int, max_requests: int, acceptance: Acceptance | None) -> TargetPlan:
    """Guesses are as many as pay where sequences have `CONTEXT` tokens; without `acceptance` there are none."""
    seconds = [placed.seconds(ForwardLoad(rows=rows)) for rows in range(max_rows + 1)]
    sequence_seconds = placed.context_seconds(CONTEXT)
    return paced_target(seconds, sequence_seconds / CONTEXT, _slots(placed), max_requests, acceptance, sequence_seconds)


def _slots(placed: PlacedModel) -> int:
    return int(placed.kv_room / placed.kv_bytes)


def paced_target(
    seconds: list[float],
    context_seconds: float,
    slots: int,
    max_requests: int,
    acceptance: Acceptance | None = None,
    sequence_seconds: float = 0.0,
    host_seconds: float = HOST,
) -> TargetPlan:
    guessing = [NO_GUESSES] * (max_requests + 1)
    if acceptance is not None:
        costs = np.array(seconds) + host_seconds
        guessing = [_guessing(n, costs + n * sequence_seconds, acceptance) for n in range(max_requests + 1)]
    return TargetPlan(seconds, context_seconds, host_seconds, slots, max_requests, guessing)


def _guessing(sequences: int, costs: np.ndarray, acceptance: Acceptance) -> Guessing:
    """As `core/scheduling/budget.py` chooses: most tokens a second."""
    most = (len(costs) - 1) / max(sequences, 1) - 1
    choices = [nodes for nodes in BUCKETS if nodes <= min(most, acceptance.gains[-1][0])]
    best = max(choices, key=lambda nodes: (1 + acceptance.gain(nodes)) / costs[sequences * (1 + nodes)], default=0)
    return Guessing(float(best), 1 + acceptance.gain(best))


def draft_of(placed: PlacedModel, leaves: int) -> DraftPlan:
    level = placed.seconds(ForwardLoad(rows=leaves)) + LEVEL_HOST
    return DraftPlan(leaves / level, _slots(placed), _reading_seconds(placed))


def prefill_of(placed: PlacedModel) -> PrefillPlan:
    return PrefillPlan(_reading_seconds(placed), EXPOSED * placed.kv_bytes / LINK)


def _reading_seconds(placed: PlacedModel) -> float:
    return placed.seconds(ForwardLoad(rows=CHUNK)) / CHUNK
