"""Sequences that run at a time without end: where one ends, the next takes its place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, count

from pilotfish.bench.budget import Workload
from pilotfish.bench.drafters import check_drafter
from pilotfish.core.request import Request
from pilotfish.engine.engine import Engine
from pilotfish.engine.sample import Sample


@dataclass(frozen=True)
class Window:
    """What came in a while."""

    seconds: float
    tokens: list[int]  # of each stream

    def rate(self, streams: Iterable[int]) -> float:
        """Tokens/s of some streams together."""
        return sum(self.tokens[stream] for stream in streams) / self.seconds


class Streams:
    """So many sequences of a workload at a time, in an engine that nobody else uses."""

    def __init__(self, engine: Engine, workload: Workload, number: int) -> None:
        self._engine = engine
        engine.worker.scheduler.max_requests = number
        self._jobs = chain.from_iterable(workload.jobs(1, lap) for lap in count())
        self._samples = [self._next() for _ in range(number)]

    def _next(self) -> Sample:
        job = next(self._jobs)
        return self._engine.submit(job.prompt.text, job.params)[0]

    @property
    def requests(self) -> list[Request]:
        """Of each stream, the one that runs now."""
        return [sample.request for sample in self._samples]

    def step(self) -> list[int]:
        """One step of the target; how many tokens it gave each stream."""
        given = {id(delta.sample): len(delta.commit.tokens) for delta in self._engine.step()}
        check_drafter(self._engine)
        tokens = [given.get(id(sample), 0) for sample in self._samples]
        self._samples = [sample if sample.finish_reason is None else self._next() for sample in self._samples]
        return tokens

    def run(self, until: Callable[[], bool]) -> Window:
        """One step, then more until it is true."""
        began = time.perf_counter()
        tokens = self.step()
        while not until():
            tokens = [a + b for a, b in zip(tokens, self.step(), strict=True)]
        return Window(time.perf_counter() - began, tokens)

    def run_for(self, seconds: float) -> Window:
        """For so long, and until the step is over."""
        end = time.perf_counter() + seconds
        return self.run(lambda: time.perf_counter() >= end)
