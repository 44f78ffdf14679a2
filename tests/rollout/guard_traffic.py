"""Traffic of a variant and the holdout in virtual time, as a guard is told of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pilotfish.rollout.guard import Guard, GuardEvent, GuardReading

HOLDOUT, VARIANT = "holdout", "next"
STEP_SECONDS = 0.02  # of the holdout, where load is 1
#: Before and after a collapse of acceptance: accepted tokens a tree, and the variant's time a token over the holdout's.
GOOD, COLLAPSED = 1.5, 0.15


@dataclass(frozen=True)
class Pace:
    """How a variant does in a second."""

    slowdown: float  # its time a token over the holdout's
    accepted: float = GOOD  # tokens a tree


@dataclass
class GuardTraffic:
    """Tokens a second are Poisson's, times lognormal: a mean of n tokens is off by `spread` / sqrt(n). The variant's are
    those of its requests that may speculate."""

    seed: int
    guard: Guard = field(default_factory=lambda: Guard(HOLDOUT, [HOLDOUT, VARIANT]))
    tokens: float = 200.0  # a second, of the variant
    holdout_tokens: float = 20.0
    spread: float = 0.43  # of a token's time, as a part of it: the ratio of both arms is then off by a tenth
    load: Callable[[float], float] = lambda _: 1.0  # what a step takes, times STEP_SECONDS, by the second
    spikes: float = 0.0  # the chance that a second of an arm takes 3 to 10 times as long
    now: float = 0.0
    speculated: int = 0  # tokens of the variant
    events: list[GuardEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def run(self, seconds: int, pace: Pace) -> list[GuardEvent]:
        """What the guard did in these seconds."""
        before = len(self.events)
        for _ in range(seconds):
            self.second(pace)
        return self.events[before:]

    def second(self, pace: Pace) -> list[GuardEvent]:
        step = STEP_SECONDS * self.load(self.now)
        own = self._reading(self.tokens * self.guard.share(VARIANT), step * pace.slowdown, pace.accepted)
        readings = {HOLDOUT: self._reading(self.holdout_tokens, step, None), VARIANT: own}
        self.now += 1
        self.speculated += own.tokens
        found = self.guard.observe(readings, self.now)
        self.events += found
        return found

    def seconds_to_cut(self, pace: Pace, most: int) -> int:
        """From a change to `pace`; `most` where it takes longer."""
        for second in range(1, most):
            if self.second(pace):
                return second
        return most

    def _reading(self, mean_tokens: float, token_seconds: float, accepted: float | None) -> GuardReading:
        tokens = int(self._random.poisson(mean_tokens))
        if tokens == 0:
            return GuardReading()
        noise = self.spread / math.sqrt(tokens)
        seconds = tokens * token_seconds * self._random.lognormal(-(noise**2) / 2, noise)
        if self._random.random() < self.spikes:
            seconds *= self._random.uniform(3, 10)
        if accepted is None:
            return GuardReading(tokens=tokens, itl_seconds=seconds, steps=tokens)
        trees = max(1, round(tokens / (1 + accepted)))
        found = int(self._random.poisson(accepted * trees))
        return GuardReading(tokens=tokens, itl_seconds=seconds, steps=trees, trees=trees, accepted=found)
