import logging
import time
from collections.abc import Mapping
from contextlib import nullcontext

import numpy as np

from pilotfish.config.engine import EngineConfig
from pilotfish.core.drafting.drafter import Drafter, NoDrafter, drafters_of
from pilotfish.core.scheduling.budget import AdaptiveBudget, Budget, FixedBudget
from pilotfish.core.scheduling.calibration import NO_CONTEXT, ContextCosts, StepCosts
from pilotfish.core.scheduling.executor import NO_NODES, NO_SAMPLING, Executor, SequenceRows
from pilotfish.model.pacer import Pacer
from pilotfish.workers.lm import LMDrafter

logger = logging.getLogger(__name__)

KNOTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
REPEATS = 3
#: Tokens of a long context, and rows of it, one of `KNOTS`.
LONG, FURTHER = 4096, 16
#: Seconds after which no larger forward is measured: what they cost follows from the others and, soon, from service.
PATIENCE = 1.0


def step_costs(executor: Executor, max_rows: int) -> StepCosts:
    began, seconds = time.perf_counter(), dict[int, float]()
    most = min(max_rows, executor.num_slots, executor.context)
    for rows in (knot for knot in KNOTS if knot <= most):
        seconds[rows] = forward_seconds(executor, rows)
        if len(seconds) > 2 and time.perf_counter() - began > PATIENCE:
            break
    return StepCosts(seconds, executor.padded, context_costs(executor, seconds))


def context_costs(executor: Executor, seconds: Mapping[int, float]) -> ContextCosts:
    """`seconds` of forwards without context."""
    before, most = min(executor.num_slots, executor.context, LONG) - FURTHER, max(seconds)
    if before < LONG // 4 or most < FURTHER:
        return NO_CONTEXT
    one, further = (forward_seconds(executor, rows, before=before) - seconds[rows] for rows in (1, FURTHER))
    each = (further - one) / (FURTHER - 1)
    return ContextCosts(max(one, 0.0) / before, max(each, 0.0) / before)


def forward_seconds(
    executor: Executor, rows: int, pacer: Pacer | None = None, feature_width: int = 0, before: int = 0
) -> float:
    """Least of `REPEATS` forwards of `rows` rows that all give logits, after `before` tokens. Overwrites the first
    slots: only while idle. A trained head's rows have features, and begin with the second token."""
    start = max(before, int(feature_width > 0))
    rows = min(rows, executor.context - start)
    features = np.zeros((rows, feature_width), np.float32) if feature_width else None
    slots = np.arange(start + rows, dtype=np.int32)
    sequence = SequenceRows(start, [0] * rows, slots, NO_NODES, range(rows), features)
    return min(_timed(executor, sequence, pacer) for _ in range(REPEATS))


def _timed(executor: Executor, sequence: SequenceRows, pacer: Pacer | None) -> float:
    began = time.perf_counter()
    with nullcontext() if pacer is None else pacer.held(sequence.num_rows):
        executor.execute([sequence], NO_SAMPLING)
    return time.perf_counter() - began


def make_budget(config: EngineConfig, executor: Executor, drafter: Drafter) -> Budget:
    """Measures forwards for an adaptive budget: only while idle."""
    if isinstance(drafter, NoDrafter) or config.budget == "fixed":
        return FixedBudget(config.nodes, config.levels)
    lm = next((d for d in drafters_of(drafter) if isinstance(d, LMDrafter)), None)
    level_seconds = 0.0 if lm is None else forward_seconds(lm.executor, config.width, lm.pacer, lm.feature_width)
    costs = step_costs(executor, config.max_rows)
    if (saved := 2 * costs.at(1) - costs.at(2)) < level_seconds:
        reason = "a draft forward takes %.2f ms and saves %.2f ms of the target at best: it will mostly rest"
        logger.warning(reason, 1000 * level_seconds, 1000 * saved)
    return AdaptiveBudget(config.nodes, config.levels, costs, level_seconds)
