"""A pace that the machine at hand holds: that of a pair of devices, stretched as far as it must be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pilotfish.cli.demo.demo_runs import Scene, Work, time_modes
from pilotfish.config.engine import EngineConfig
from pilotfish.model.pacer import Pacer

#: Milliseconds of a forward of a 70B model on four H200, and of a level of a 1B model on one.
TARGET_MS, DRAFT_MS = 10.4, 2.6
DEVICES = "a 70B target on four H200 and a 1B draft on one"
#: Seconds and rounds of the measurement, at most.
SECONDS, ROUNDS = 3.0, 100
#: The share of forwards that must be in time while they are measured (of a run at most one in a hundred may be late),
#: and what is added to their time where they are not: a later run is no copy of the measured one.
IN_TIME, MARGIN = 0.997, 1.2


def stretched(stretch: float) -> str:
    """A pace of TARGET_MS and DRAFT_MS, both so many times slower."""
    target, draft = (f"{round(time * stretch, 3):g}ms" for time in (TARGET_MS, DRAFT_MS))
    return f"target={target},draft={draft}"


def paced_scene(pair: str, config: EngineConfig, stretch: float) -> Scene:
    """A pair, slower than DEVICES by a factor that its title names."""
    pace = stretched(stretch)
    slowed = "" if stretch == 1 else f", {stretch:g} times slower: what this machine holds"
    title = f"{pair} at the pace of {DEVICES}{slowed} ({pace})"
    return Scene("paced", title, pair, replace(config, pace=pace), stretch)


def measured_scene(pair: str, config: EngineConfig, work: Work, *, quiet: bool) -> Scene:
    """The pair at the pace that it holds here, measured as it will run: in mode async, target and draft at once, with
    the pauses that cool caches."""
    trial = paced_scene(pair, config, 1.0)
    timing = time_modes(trial.config, work, ROUNDS, seconds=SECONDS, quiet=quiet)
    return paced_scene(pair, config, stretch_of(timing.pacing))


def slower_scene(scene: Scene, pacing: Sequence[Pacer]) -> Scene:
    """The scene at a pace that it would have held while it did not hold its own."""
    assert scene.stretch is not None
    stretch = scene.stretch * max(MARGIN, MARGIN * _taken(pacing))
    return paced_scene(scene.pair, scene.config, _rounded_up(stretch))


def stretch_of(pacing: Sequence[Pacer]) -> float:
    """By how much the paces must be stretched, 1 at least, for all but a few of these forwards to be in time."""
    taken = _taken(pacing)
    return 1.0 if taken <= 1 else _rounded_up(MARGIN * taken)


def _taken(pacing: Sequence[Pacer]) -> float:
    """Of their pace, by nearly every forward of each model."""
    return max((float(np.quantile(pacer.taken, IN_TIME)) for pacer in pacing if pacer.taken), default=0.0)


def _rounded_up(stretch: float) -> float:
    return math.ceil(10 * stretch) / 10
