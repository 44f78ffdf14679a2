"""How much of a hand-over's transfer passes while its KV is computed: a deep model with random weights, a core each for
target and prefill worker."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pilotfish.bench.disaggregation import PacedForward, forwards_of, overrun_share, start_prefill_pool
from pilotfish.bench.offered_loads import TokenRing, tokens_of
from pilotfish.bench.options import BenchOptions
from pilotfish.bench.proxy import HOST
from pilotfish.bench.report import MEBIBYTE, ProgressBar, Report, Row, Spread
from pilotfish.bench.shapes import DEEP, write_served_model
from pilotfish.bench.steps import DEVICE
from pilotfish.bench.workload import parse_numbers
from pilotfish.config.engine import EngineConfig
from pilotfish.core.prefilling.handover import WHOLE, HandOverReport
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.engine.processes.process import on_cores
from pilotfish.errors import EngineError
from pilotfish.model.loading.precision import precision_of

#: Where the worker listens, and ways to read its memory.
TRANSPORTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "shm": ("ipc://{directory}/shm", ("shm",)),
    "ipc": ("ipc://{directory}/ipc", ()),
    "tcp": (f"tcp://{HOST}:0", ()),
}
#: Of a transfer, that is to pass while KV is computed.
PROMISE = 0.8
FIRST_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@dataclass(frozen=True)
class HandedTwice:
    """A prompt whose KV the worker computed, and then had in its cache: the second hand-over is nearly all transfer."""

    computed: HandOverReport
    cached: HandOverReport

    @property
    def alone(self) -> float:
        """Seconds of the transfer where no computing hides it."""
        return self.cached.seconds - self.cached.queued

    @property
    def hidden(self) -> float:
        """Share of the transfer that passed while the KV was computed; below 0 where messages took longer than all of
        it."""
        return 1 - self.computed.exposed / self.alone


def run_hidden_transfer(options: BenchOptions, progress: ProgressBar) -> Report:
    """`repeats` prompts of each length over each transport, after one to warm up."""
    lengths = parse_numbers("lengths", options.lengths)
    precision = precision_of(options.engine["dtype"], DEEP, DEVICE, eager=False)
    progress.total = len(TRANSPORTS) * len(lengths)
    rows, forwards = list[Row](), list[PacedForward]()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory, "model")
        write_served_model(DEEP, precision.dtype, model)
        config = EngineConfig(target=model, mode="off", **options.engine)
        for transport in TRANSPORTS:
            timeline = Path(directory, f"{transport}.json")
            with _engine_beside_worker(config, transport, options.prefill_rows, timeline) as engine:
                ring = TokenRing(tokens_of(options.rows(), engine.tokenizer), seed=0)
                rows += [_of_length(engine, ring, length, options.repeats, progress) for length in lengths]
            forwards += forwards_of(timeline)
    results = {"dtype": precision.name, "handovers": rows, "overruns": overrun_share(forwards), "promise": PROMISE}
    return Report(results)


@contextmanager
def _engine_beside_worker(config: EngineConfig, transport: str, rows: int, timeline: Path) -> Iterator[Engine]:
    """An engine that keeps no KV and hands every prompt to a worker that does, on a core each. The worker writes
    `timeline`."""
    cores = sorted(os.sched_getaffinity(0))
    listen, transports = TRANSPORTS[transport]
    endpoint = listen.format(directory=timeline.parent)
    pool = start_prefill_pool(replace(config, max_rows=rows), endpoint, frozenset(cores[-1:]), timeline)
    with pool, on_cores(frozenset(cores[:1])):
        elsewhere: dict[str, Any] = {"prefill_pool": (pool.told["endpoint"],), "prefill_transports": transports}
        own: dict[str, Any] = {"prefix_cache": False, "threads": 1, "prefill_threshold": "1"}
        with Engine(replace(config, **elsewhere, **own)) as engine:
            yield engine


def _of_length(engine: Engine, ring: TokenRing, length: int, repeats: int, done: ProgressBar) -> Row:
    prompts = [ring.cut(length) for _ in range(repeats + 1)]
    handed = [HandedTwice(_hand_over(engine, prompt), _hand_over(engine, prompt)) for prompt in prompts]
    done(f"{handed[0].computed.transport}, {length} tokens")
    return row_of(length, handed[1:])


def _hand_over(engine: Engine, prompt: Sequence[int]) -> HandOverReport:
    """EngineError where it did not go well."""
    [sample] = engine.submit(prompt, FIRST_TOKEN)
    while engine.busy:
        engine.step()
    reports = sample.request.stats.handovers
    if [report.outcome for report in reports] != [WHOLE]:
        raise EngineError(f"bench: a hand-over ended with {[report.outcome for report in reports]}")
    return reports[0]


def row_of(length: int, handed: Sequence[HandedTwice]) -> Row:
    """`alone_ms` is the transfer where the worker had the KV, `work_ms` what the target's thread did of it while the KV
    was computed, `work_hidden` the share of that on segments that were there before the last row was; with
    `needed_mb_per_s` a transfer keeps up with the computing."""
    first = handed[0].computed
    computing = statistics.median(one.computed.computing for one in handed)
    return {
        "prompt_tokens": length,
        "transport": first.transport,
        "mib": first.size / MEBIBYTE,
        "needed_mb_per_s": first.size / computing / 1e6,
        "computing_ms": 1000 * computing,
        "work_ms": Spread.of([1000 * one.computed.transfer for one in handed]),
        "alone_ms": Spread.of([1000 * one.alone for one in handed]),
        "exposed_ms": Spread.of([1000 * one.computed.exposed for one in handed]),
        "work_hidden": statistics.median(one.computed.hidden / one.computed.transfer for one in handed),
        "hidden": Spread.of([one.hidden for one in handed]),
    }
