"""A process that holds an engine, puts it under load, and says what came when: sequences that decode all the while, and
prompts that arrive among them.

`python -m pilotfish.bench.loaded CONFIG` has the engine of a configuration, as `config_text` writes it. It answers each
OfferedLoad, a line of JSON, with a LoadedRun."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import msgspec

from pilotfish.bench.offered_loads import LoadedRun, OfferedLoad
from pilotfish.config.engine import EngineConfig
from pilotfish.config.text import config_of
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.engine.processes.process import die_with_parent, name_process
from pilotfish.engine.sample import Sample
from pilotfish.errors import EngineError

#: Seconds that streams decode before anything is measured, and that prompts may take once no more arrive.
WARM_UP, PATIENCE = 1.0, 120.0


class LoadedEngine:
    """An idle engine under one load."""

    def __init__(self, engine: Engine, load: OfferedLoad) -> None:
        self._engine, self._load = engine, load
        engine.worker.scheduler.max_rows = load.rows
        self._streams: dict[int, float | None] = {}  # when a stream was last given tokens
        self._samples: list[Sample] = []  # of the arrivals so far
        self._first: dict[int, float] = {}  # milliseconds to an arrival's first token
        self._gaps: list[float] = []
        self._tokens = 0

    def play(self) -> LoadedRun:
        for prompt in self._load.streams:
            room = self._engine.model.config.context - len(prompt)
            self._streams[self._submit(prompt, room).request_id] = None
        self._warm_up()
        self._engine.reset_pacing()
        self._gaps.clear()
        self._tokens, began = 0, time.perf_counter()
        end = began + self._load.seconds
        while time.perf_counter() < end:
            self._take_in(began)
            self._step(began, min(self._next_at(began), end))
        gaps, tokens, seconds = list(self._gaps), self._tokens, time.perf_counter() - began
        self._finish(began)
        outputs = [sample.token_ids for sample in self._samples]
        first_tokens = [self._first[sample.request_id] for sample in self._samples]
        handovers = [report for sample in self._samples for report in sample.request.stats.handovers]
        counts = next(((pacer.forwards, pacer.overruns) for pacer in self._engine.pacing()), (0, 0))
        self._engine.abort_all()
        return LoadedRun(began, seconds, gaps, first_tokens, outputs, tokens, handovers, *counts)

    def _submit(self, prompt: Sequence[int], new_tokens: int) -> Sample:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        return self._engine.submit(prompt, params, self._load.salt)[0]

    def _warm_up(self) -> None:
        end = time.perf_counter() + WARM_UP
        while None in self._streams.values() or (time.perf_counter() < end and self._streams):
            self._step(0.0, end)

    def _finish(self, began: float) -> None:
        """Until every arrival has its output."""
        end = time.perf_counter() + PATIENCE
        while any(sample.finish_reason is None for sample in self._samples):
            if time.perf_counter() > end:
                raise EngineError(f"bench: prompts were not computed {PATIENCE:g} s after the last had arrived")
            self._step(began, end)

    def _next_at(self, began: float) -> float:
        waiting = self._load.arrivals[len(self._samples) :]
        return began + waiting[0].at if waiting else float("inf")

    def _take_in(self, began: float) -> None:
        while self._next_at(began) <= time.perf_counter():
            arrival = self._load.arrivals[len(self._samples)]
            self._samples.append(self._submit(arrival.tokens, self._load.new_tokens))

    def _step(self, began: float, until: float) -> None:
        """Or wait `until` then, where there is nothing to do."""
        if not self._engine.busy:
            time.sleep(max(until - time.perf_counter(), 0.0))
            return
        given = {delta.id: len(delta.tokens) for delta in self._engine.step() if delta.tokens}
        now = time.perf_counter()
        self._tokens += sum(given.values())
        for stream, before in self._streams.items():
            if stream in given:
                self._gaps += [] if before is None else [1000 * (now - before)]
                self._streams[stream] = now
        for sample, arrival in zip(self._samples, self._load.arrivals, strict=False):
            if sample.request_id in given:
                self._first.setdefault(sample.request_id, 1000 * (now - began - arrival.at))


def main() -> None:
    name_process("engine under load")
    die_with_parent()
    with Engine(config_of(sys.argv[1], EngineConfig)) as engine:
        _answer(b"{}")
        for line in sys.stdin:
            _answer(msgspec.json.encode(LoadedEngine(engine, msgspec.json.decode(line, type=OfferedLoad)).play()))


def _answer(answer: bytes) -> None:
    sys.stdout.buffer.write(answer + b"\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
