"""The memory plan against what a process takes when rows and KV slots are all in use."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pilotfish.bench.report import print_table
from pilotfish.config import EngineConfig
from pilotfish.core.budget import FixedBudget
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.engine.memory import MemoryPlan, anonymous_memory, gib
from pilotfish.engine.sample import Sample

SAMPLED_EVERY = 0.001  # seconds
NEW_TOKENS = 8


@dataclass(frozen=True)
class MemoryReport:
    """Bytes; `peak` is of memory that no file backs."""

    plan: MemoryPlan
    total: int
    loaded: int
    peak: int
    requests: int
    preemptions: int

    @property
    def deviation(self) -> float:
        """Of the peak from the plan."""
        return self.peak / self.total - 1


class Peak:
    """The most that this process has taken, sampled by a thread while in use."""

    def __init__(self) -> None:
        self.bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._over.wait(SAMPLED_EVERY):
            self.bytes = max(self.bytes, anonymous_memory())

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def run_memory(config: EngineConfig, done: Callable[[str], None] = lambda _: None) -> MemoryReport:
    """Fill the pool with random prompts, all sampled with all filters. Right only in a fresh process."""
    with Peak() as peak:
        engine = Engine(config)
        gc.collect()
        loaded = anonymous_memory()
        engine.use(engine.drafter, FixedBudget(config.nodes, config.levels))
        samples = fill(engine)
        while engine.busy:
            for delta in engine.step():
                if delta.sample.finish_reason is not None:
                    done("filling")
    plan, preemptions = engine.memory, sum(sample.request.stats.preemptions for sample in samples)
    return MemoryReport(plan, plan.total, loaded, peak.bytes, len(samples), preemptions)


def fill(engine: Engine) -> list[Sample]:
    """Requests that together need all slots, and every buffer that sampling may need."""
    slots, count = engine.memory.slots, engine.config.max_requests
    length = min(slots // count, engine.model.shape.context) - NEW_TOKENS
    rng, vocab_size = np.random.default_rng(0), engine.model.shape.vocab_size
    filters = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.01, "frequency_penalty": 0.1}
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, **filters)  # type: ignore[arg-type]
    return [s for _ in range(count) for s in engine.submit(rng.integers(0, vocab_size, length).tolist(), params)]


def print_memory(report: MemoryReport) -> None:
    plan = report.plan
    rows = [
        ("runtime", gib(plan.runtime)),
        ("weights", gib(plan.weights)),
        (f"{plan.slots} KV slots", gib(plan.slots * plan.slot)),
        (f"workspace of {plan.max_rows} rows", gib(plan.workspace)),
        ("planned", gib(report.total)),
        ("measured peak", gib(report.peak)),
        ("peak over plan", f"{report.deviation:+.1%}"),
    ]
    print_table(f"GiB; {report.requests} requests, {report.preemptions} preemptions", ("", "GiB"), rows)
    print_table("", ("the draft takes what so many KV slots would",), [(plan.draft_in_slots,)])
