import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from pilotfish.config.fields import Mode
from pilotfish.plan.simulation.acceptance import AcceptanceTrace
from pilotfish.plan.simulation.run import SimulatedRun, simulate
from pilotfish.plan.simulation.setup import Setup, SimulatedLoad, closed_load, poisson_load

#: Default requests of each setting: this many for each at a time, and at least `LEAST`.
REQUESTS_EACH, LEAST = 4, 32

#: "": none, in mode off.
TreeBudget = Literal["", "auto", "fixed"]


class SweepPoint(Struct, frozen=True, kw_only=True):
    """Times in seconds."""

    mode: Mode
    budget: TreeBudget
    load: float  # requests at a time, or a second
    tokens_per_second: float
    user_tokens_per_second: float  # of half of the requests at least, from when they came
    tokens_per_step: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float  # after the first token
    tpot_p99: float
    draft_busy: float | None = None  # share of the time
    speedup: float = 1.0  # over off, of all tokens/s; of a user's where requests come whatever has ended
    over_better: float | None = None  # the rule's tokens/s over the better of off and fixed trees

    @property
    def setting(self) -> str:
        return f"{self.mode}, {self.budget}" if self.budget else self.mode


class Sweep(Struct, frozen=True, kw_only=True):
    """With `setup`'s adaptive budget each mode is run with fixed trees as well."""

    setup: Setup  # its mode is not used
    trace: AcceptanceTrace
    modes: Sequence[Mode]  # besides off
    loads: Sequence[float]
    poisson: bool = False  # loads are requests a second
    requests: int | None = None
    output: int = 128  # tokens of each

    @property
    def settings(self) -> list[tuple[Mode, TreeBudget]]:
        """Off first, fixed trees before those of the rule."""
        budgets: tuple[TreeBudget, ...] = ("fixed", "auto") if self.setup.speculation.adaptive else ("fixed",)
        return [("off", ""), *((mode, budget) for mode in self.modes for budget in budgets)]

    @property
    def runs(self) -> int:
        return len(self.settings) * len(self.loads)

    def points(self, done: Callable[[], None]) -> Iterator[SweepPoint]:
        for load in self.loads:
            of_load: dict[tuple[Mode, TreeBudget], SweepPoint] = {}
            for mode, budget in self.settings:
                of_load[mode, budget] = self._compared(self._point(mode, budget, load), of_load)
                done()
            yield from of_load.values()

    def _point(self, mode: Mode, budget: TreeBudget, load: float) -> SweepPoint:
        speculation = replace(self.setup.speculation, mode=mode, adaptive=budget == "auto")
        setup = replace(self.setup, speculation=speculation)
        return point_of(simulate(setup, self.trace, self._load(load)), setup, budget, load)

    def _load(self, load: float) -> SimulatedLoad:
        requests = self.requests or max(LEAST, REQUESTS_EACH * math.ceil(0 if self.poisson else load))
        sequences = len(self.trace.prompts)
        if self.poisson:
            return poisson_load(requests, load, self.output, sequences)
        return closed_load(requests, int(load), self.output, sequences)

    def _compared(self, point: SweepPoint, others: dict[tuple[Mode, TreeBudget], SweepPoint]) -> SweepPoint:
        if point.mode == "off":
            return point
        off, fixed = others["off", ""], others.get((point.mode, "fixed"))
        own, plain = (p.user_tokens_per_second if self.poisson else p.tokens_per_second for p in (point, off))
        better = max(off.tokens_per_second, fixed.tokens_per_second) if fixed else None
        return replace(point, speedup=own / plain, over_better=better and point.tokens_per_second / better)


def point_of(run: SimulatedRun, setup: Setup, budget: TreeBudget, load: float) -> SweepPoint:
    firsts = [times.first - times.came for times in run.requests]
    each = [(times.ended - times.first) / (times.tokens - 1) for times in run.requests if times.tokens > 1] or [0.0]
    return SweepPoint(
        mode=setup.speculation.mode,
        budget=budget,
        load=load,
        tokens_per_second=run.tokens_per_second,
        user_tokens_per_second=median(times.tokens / (times.ended - times.came) for times in run.requests),
        tokens_per_step=run.tokens_per_step,
        ttft_p50=median(firsts),
        ttft_p99=float(np.percentile(firsts, 99)),
        tpot_p50=median(each),
        tpot_p99=float(np.percentile(each, 99)),
        draft_busy=_draft_busy(run, setup),
    )


def _draft_busy(run: SimulatedRun, setup: Setup) -> float | None:
    """Of pools, or of a draft that targets wait for, its messages included."""
    if setup.speculation.mode == "off":
        return None
    waits = sum(step.drafted - step.planned for steps in run.steps for step in steps) / len(run.steps)
    busy = sum(run.pools) / len(run.pools) if run.pools else waits
    return min(busy / run.seconds, 1.0)


def crossover(points: Sequence[SweepPoint]) -> float | None:
    """The first load, interpolated in log load, with a speed-up below 1; None: there is none. `points` ascend."""
    if points[0].speedup < 1:
        return points[0].load
    for before, after in pairwise(points):
        if after.speedup < 1:
            share = (before.speedup - 1) / (before.speedup - after.speedup)
            return float(before.load * (after.load / before.load) ** share)
    return None
