"""A pace that the machine at hand can hold."""

from __future__ import annotations

import io
import math
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from pilotfish.bench.contestants import Run, contestant_of, joined
from pilotfish.cli.demo_scenes import jobs_of
from pilotfish.config import EngineConfig
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine

#: Milliseconds of a forward of a 70B model on four H200, and of a 1B model on one.
TARGET_MS, DRAFT_MS = 10.4, 2.6
#: Seconds of the measurement.
SECONDS = 3.0
#: The share of forwards that must be in time while they are measured (of a run at most one in a hundred may be late),
#: and what is added to their time where they are not.
IN_TIME, MARGIN = 0.996, 1.25
#: A forward that is in time returns this little late: a sleeper is not woken at once.
WAKING = 1.08


def stretched(stretch: float) -> str:
    """A pace of TARGET_MS and DRAFT_MS, both so many times slower."""
    target, draft = (f"{round(time * stretch, 3):g}ms" for time in (TARGET_MS, DRAFT_MS))
    return f"target={target},draft={draft}"


def note_of(stretch: float) -> str:
    return "" if stretch == 1 else f" ({stretch:g} times slower than they are: faster is too fast here)"


def stretch_of(target: Sequence[float], draft: Sequence[float]) -> float:
    """By how much TARGET_MS and DRAFT_MS must be stretched, 1 at least, for all but a few of these forwards to be in
    time."""
    ratio = max(_late(target) / TARGET_MS, _late(draft) / DRAFT_MS)
    return 1.0 if ratio <= WAKING else math.ceil(10 * MARGIN * ratio) / 10


def _late(times: Sequence[float]) -> float:
    return float(np.quantile(times, IN_TIME)) if times else 0.0


def measure(config: EngineConfig, params: SamplingParams) -> tuple[list[float], list[float]]:
    """Run `config`, of mode async, at TARGET_MS and DRAFT_MS: with the pauses that cool caches, as the demo will.
    Milliseconds of the target's forwards, sampling included, and of the draft's levels, prompts included: the pace, or
    longer."""
    jobs = jobs_of(params)
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory, "timeline.json")
        engine = Engine(replace(config, trace=trace, pace=stretched(1.0)))
        try:
            contestant, runs = contestant_of(engine), list[Run]()
            contestant.run(engine, jobs[:1], 1)  # to warm up
            began = time.perf_counter()
            while time.perf_counter() < began + SECONDS:
                runs.append(contestant.run(engine, jobs, 1))
        finally:
            with redirect_stderr(io.StringIO()):  # a draft worker warns that it did not keep its pace
                engine.close()
        events = msgspec.json.decode(trace.read_bytes())["traceEvents"]
    levels = [event["dur"] / 1000 for event in events if event["name"] == "level" and event["ts"] >= 1e6 * began]
    return [1000 * (step.verified - step.prepared) for step in joined(runs).steps], levels
