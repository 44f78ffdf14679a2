"""A pace that the machine at hand can hold."""

from __future__ import annotations

import io
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pilotfish.cli.compare import run_pass
from pilotfish.config import EngineConfig
from pilotfish.core.sampling_params import SamplingParams

if TYPE_CHECKING:  # imports torch
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


@dataclass(frozen=True)
class HeldPace:
    """TARGET_MS and DRAFT_MS, both slower by the factor that the machine needs to keep up."""

    stretch: float  # 1 at least

    @property
    def text(self) -> str:
        target, draft = (f"{round(time * self.stretch, 3):g}ms" for time in (TARGET_MS, DRAFT_MS))
        return f"target={target},draft={draft}"

    @property
    def note(self) -> str:
        return "" if self.stretch == 1 else f" ({self.stretch:g} times slower than they are: faster is too fast here)"


@dataclass(frozen=True)
class Forwards:
    """Milliseconds of forwards on this machine at TARGET_MS and DRAFT_MS, sampling included: the pace, or longer."""

    target: Sequence[float]
    draft: Sequence[float]  # levels, prompts included

    @property
    def held(self) -> HeldPace:
        """The fastest pace that all but a few of them kept."""
        ratio = max(_late(self.target) / TARGET_MS, _late(self.draft) / DRAFT_MS)
        return HeldPace(1.0 if ratio <= WAKING else math.ceil(10 * MARGIN * ratio) / 10)


def _late(times: Sequence[float]) -> float:
    return float(np.quantile(times, IN_TIME)) if times else 0.0


def measure(config: EngineConfig, prompts: Sequence[str], params: SamplingParams) -> Forwards:
    """Run `config`, of mode async, at TARGET_MS and DRAFT_MS: with the pauses that cool caches, as the demo will."""
    from pilotfish.engine.engine import Engine

    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory, "timeline.json")
        with _quietly_closed(Engine(replace(config, trace=trace, pace=HeldPace(1.0).text))) as engine:
            run_pass(engine, prompts[:1], params)  # warm up
            began = time.perf_counter()
            while time.perf_counter() < began + SECONDS:
                run_pass(engine, prompts, params)
        events = msgspec.json.decode(trace.read_bytes())["traceEvents"]
    return forwards_in([event for event in events if event.get("ts", 0.0) >= 1e6 * began])


@contextmanager
def _quietly_closed(engine: Engine) -> Iterator[Engine]:
    """Hide the warning of a draft worker that it did not keep its pace: that is what is measured here."""
    try:
        yield engine
    finally:
        with redirect_stderr(io.StringIO()):
            engine.close()


def forwards_in(events: Sequence[dict[str, object]]) -> Forwards:
    """Of a timeline. A pace covers forward and verify of a target, all of a draft's level."""

    def times(name: str) -> list[float]:
        return [float(str(event["dur"])) / 1000 for event in events if event["name"] == name]

    target = [sum(parts) for parts in zip(times("forward"), times("verify"), strict=True)]
    return Forwards(target, times("level"))
