"""The memory plan against what a process takes when rows and KV slots are all in use."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from pilotfish.bench.contestants import drain
from pilotfish.bench.options import BenchOptions
from pilotfish.bench.report import Progress, Report
from pilotfish.core.budget import FixedBudget
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.engine.memory import anonymous_memory, gib
from pilotfish.engine.sample import Sample

SAMPLED_EVERY = 0.001  # seconds
NEW_TOKENS = 8


@contextmanager
def sampled_peak() -> Iterator[list[int]]:
    """The most that this process takes meanwhile, sampled by a thread: the last item."""
    peak, over = [0], threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLED_EVERY):
            peak[0] = max(peak[0], anonymous_memory())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def run_memory(options: BenchOptions, progress: Progress) -> Report:
    """Fill the pool with random prompts, all sampled with all filters. Right only in a fresh process."""
    config = options.engine_config()
    progress.total = config.max_requests
    with sampled_peak() as peak:
        engine = Engine(config)
        gc.collect()
        loaded = anonymous_memory()
        engine.use(engine.drafter, FixedBudget(config.nodes, config.levels))
        samples = fill(engine)
        drain(engine, partial(progress, "filling"))
    plan = engine.memory
    planned = {
        "runtime": plan.runtime,
        "weights": plan.weights,
        f"{plan.slots} KV slots": plan.slots * plan.slot,
        f"workspace of {plan.max_rows} rows": plan.workspace,
        "planned": plan.total,
        "measured peak": peak[0],
    }
    results = {
        "plan": [{"part": name, "GiB": gib(size)} for name, size in planned.items()],
        "total": plan.total,
        "loaded": loaded,
        "peak": peak[0],
        "deviation": peak[0] / plan.total - 1,
        "draft_in_slots": plan.draft_in_slots,
        "requests": len(samples),
        "preemptions": sum(sample.request.stats.preemptions for sample in samples),
    }
    return Report(results)


def fill(engine: Engine) -> list[Sample]:
    """Requests that together need all slots, and every buffer that sampling may need."""
    slots, count = engine.memory.slots, engine.config.max_requests
    length = min(slots // count, engine.model.shape.context) - NEW_TOKENS
    rng, vocab_size = np.random.default_rng(0), engine.model.shape.vocab_size
    filters = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.01, "frequency_penalty": 0.1}
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, **filters)  # type: ignore[arg-type]
    return [s for _ in range(count) for s in engine.submit(rng.integers(0, vocab_size, length).tolist(), params)]
