"""Executors are tried at start, as requests will use them: where a device does not run a kernel, the reference does."""

import gc
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from pilotfish.config.engine import EngineConfig
from pilotfish.core.sampling.logit_rules import LogitRules
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import NO_NODES, NO_SAMPLING, Executor, NodeRows, Sampling, SequenceRows
from pilotfish.engine.memory import device_of
from pilotfish.model.devices import kernels_of
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.heads.executor import HeadExecutor
from pilotfish.model.loading.metadata import one_line
from pilotfish.model.sampling import PERTURBED
from pilotfish.progress import PhaseProgress

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
