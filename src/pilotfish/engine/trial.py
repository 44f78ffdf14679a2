"""Executors are tried at start, as requests will use them: where a device does not run a kernel, the reference does.
Their forwards are measured, for budgets."""

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from pilotfish.config.engine import EngineConfig
from pilotfish.core.drafting.drafter import Drafter, NoDrafter, drafters_of
from pilotfish.core.sampling.logit_rules import LogitRules
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.budget import AdaptiveBudget, Budget, FixedBudget
from pilotfish.core.scheduling.calibration import NO_CONTEXT, ContextCosts, StepCosts
from pilotfish.core.scheduling.executor import NO_NODES, NO_SAMPLING, Executor, NodeRows, Sampling, SequenceRows
from pilotfish.engine.memory import device_of
from pilotfish.model.devices import kernels_of
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.heads.executor import HeadExecutor
from pilotfish.model.loading.metadata import one_line
from pilotfish.model.pacer import Pacer
from pilotfish.model.sampling import PERTURBED
from pilotfish.progress import PhaseProgress
from pilotfish.workers.lm import LMDrafter

logger = logging.getLogger(__name__)

FELL_BACK = "--eager is used for"  # in the warning
Made = TypeVar("Made", bound=Executor)

PARAMS = SamplingParams(top_k=8, top_p=0.9, min_p=0.1, presence_penalty=1, logit_bias={1: 1}, allowed_token_ids=(1,))


def on_kernels(
    config: EngineConfig, what: str, make: Callable[[EngineConfig], Made], then: Callable[[Made], None] = lambda _: None
) -> tuple[Made, EngineConfig]:
    """What `make` makes, tried, by `then` too; its configuration: with `eager`, untried, if a kernel does not run."""
    device = device_of(config)
    if device.type == "cpu":
        return make(config), config
    failures = kernels_of(device, 0, eager=config.eager).failures
    try:
        return _tried(make(config), then), config
    except failures as error:
        if config.tensor_parallel > 1 or isinstance(error, torch.OutOfMemoryError):
            raise  # the other ranks have their kernels; and the reference needs as much memory
        logger.warning(f"a kernel does not run on this device: {FELL_BACK} %s: %s", what, one_line(error))
    if torch.cuda.is_available():
        torch.cuda.set_stream(torch.cuda.default_stream(device))  # a recording that fails leaves its own
    gc.collect()  # an executor holds itself, by its forward
    torch.cuda.empty_cache()
    PERTURBED.pop(device.type, None)  # what is drawn after a forward is drawn without kernels too
    return make(eager := replace(config, eager=True)), eager


def _tried(executor: Made, then: Callable[[Made], None]) -> Made:
    """Rows of a prompt and of a node, drawn with all filters, and by rules of all kinds. Overwrites the first slots."""
    rules, of_two = LogitRules(PARAMS, [1], frozenset(), ()), (np.zeros(2, np.int64), np.arange(2))
    width = executor.feature_width if isinstance(executor, HeadExecutor) else 0
    for tokens in (2, 256):  # products of few rows and of many have other kernels
        end = min(tokens, executor.context - 1, executor.num_slots - 1)
        node = NodeRows(np.ones(1, np.int64), np.ones(1, np.int64), np.full((1, 1), end, np.int32))
        prefix, features = np.arange(end, dtype=np.int32), np.zeros((end - 1, width), np.float32)
        rows = SequenceRows(1, [1] * (end - 1), prefix, node, [end - 2], features)
        for edits, places in ((), None), ([rules.edits([]), rules.edits([2])], np.arange(2)):
            executor.execute([rows], Sampling(places, [PARAMS], [0], *of_two, edits, children=4))
    then(executor)
    return executor


def record_forwards(executor: TorchExecutor, max_rows: int, max_samples: int, params: SamplingParams) -> None:
    """Those that serving replays most: ends of prompts, and rows that all give a token, of every size; a part of a long
    prompt; few rows after prefixes of every size. Others are recorded when they first occur. Only while idle: it
    overwrites the first slots."""
    if not executor.model.recordable:
        return
    began, every = time.perf_counter(), list(_sequences(executor, max_rows, max_samples))
    with PhaseProgress() as progress, progress.phase("recording forwards", len(every)) as advance:
        for sequence in every:
            samples = len(sequence.kept)
            places = np.zeros(samples, np.int64), np.arange(samples)
            executor.execute([sequence], Sampling(None, [params], [0], *places) if samples else NO_SAMPLING)
            advance()
    logger.info("recorded %d forwards in %.1f s", len(every), time.perf_counter() - began)


def _sequences(executor: TorchExecutor, max_rows: int, max_samples: int) -> Iterator[SequenceRows]:
    buckets, most = executor.buckets, min(executor.context, executor.num_slots)
    sizes = [min(size, most) for size in buckets.rows if size <= executor.padded(min(max_rows, most))]
    for rows in sizes:
        all_sample = [rows] if rows <= executor.padded(min(max_samples, most)) else []
        for kept in (1, *all_sample, *([0] if rows == sizes[-1] else [])):
            slots = np.arange(rows, dtype=np.int32)
            yield SequenceRows(0, [0] * rows, slots, NO_NODES, range(rows - kept, rows))
    for reach in buckets.prefix[1:]:
        if reach <= executor.context:
            yield SequenceRows(reach - 1, [0], np.zeros(reach, np.int32), NO_NODES, [0])


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
