import logging
import time
from collections.abc import Iterator

import numpy as np

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import NO_NODES, NO_SAMPLING, Sampling, SequenceRows
from pilotfish.model.executor import TorchExecutor
from pilotfish.progress import PhaseProgress

logger = logging.getLogger(__name__)


def record_forwards(executor: TorchExecutor, max_rows: int, max_samples: int, params: SamplingParams) -> None:
    """Those that serving replays most: ends of prompts, and rows that all give a token, of every size; a part of a long
    prompt; few rows after prefixes of every size. Others are recorded when they first occur. Only while idle: it
    overwrites the first slots."""
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
