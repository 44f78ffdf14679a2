"""Traffic of a variant and the holdout in virtual time, as a guard is told of it, and how long the guard takes."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from pilotfish.operate.guarding.guard import Guard, GuardEvent
from pilotfish.operate.guarding.guard_readings import GuardReading

HOLDOUT, VARIANT = "holdout", "next"
STEP_SECONDS = 0.02  # of the holdout, where load is 1
TOKENS, HOLDOUT_TOKENS = 200.0, 20.0  # a second


@dataclass(frozen=True)
class VariantPace:
    """How a variant does."""

    slowdown: float  # its time a token over the holdout's
    accepted: float = 1.5  # tokens a step
    sharing: int = 8  # sequences a step; 0: prompts leave no room for guesses


GOOD, SLOW = VariantPace(0.7), VariantPace(1.5)
#: A tenth of the acceptance, which makes the variant a tenth slower than the holdout.
UNACCEPTED = VariantPace(1.1, accepted=0.15)


def spread_of(noise: float) -> float:
    """Of a token's time, for which a second's ratio of both arms is off by `noise`; both as parts of the whole."""
    return noise / math.sqrt(1 / TOKENS + 1 / HOLDOUT_TOKENS)


@dataclass
class GuardTraffic:
    """Tokens a second are Poisson's, times lognormal: a mean of n tokens is off by `spread` / sqrt(n). The variant's
    are those of its requests that may speculate."""

    seed: int
    guard: Guard = field(default_factory=lambda: Guard(HOLDOUT, [HOLDOUT, VARIANT]))
    tokens: float = TOKENS
    holdout_tokens: float = HOLDOUT_TOKENS
    spread: float = spread_of(0.1)
    load: Callable[[float], float] = lambda _: 1.0  # what a step takes, times STEP_SECONDS, by the second
    spikes: float = 0.0  # the chance that a second of an arm takes 3 to 10 times as long
    persistent: float = 0.0  # noise of the variant that forgets a fifth of itself each second, as a part of its times
    now: float = 0.0
    speculated: int = 0  # tokens of the variant
    events: list[GuardEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reseed(self.seed)
        self._persisting = 0.0

    def reseed(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    @property
    def state(self) -> str:
        return self.guard.told()[VARIANT].state

    def run(self, seconds: int, pace: VariantPace) -> list[GuardEvent]:
        """What the guard did in these seconds."""
        return [event for _ in range(seconds) for event in self.second(pace)]

    def seconds_until(self, kind: str, pace: VariantPace, most: int) -> int:
        """An event; `most` where it takes longer."""
        for second in range(1, most):
            if any(event.kind == kind for event in self.second(pace)):
                return second
        return most

    def second(self, pace: VariantPace) -> list[GuardEvent]:
        step = STEP_SECONDS * self.load(self.now)
        if self.persistent:
            self._persisting = 0.8 * self._persisting + 0.6 * self.persistent * float(self._random.normal())
        own_step = step * pace.slowdown * math.exp(self._persisting)
        own = self._reading(self.tokens * self.guard.share(VARIANT), own_step, pace)
        readings = {HOLDOUT: self._reading(self.holdout_tokens, step, None), VARIANT: own}
        self.now += 1
        self.speculated += own.tokens
        found = self.guard.observe(readings, self.now)
        self.events += found
        return found

    def _reading(self, mean_tokens: float, token_seconds: float, pace: VariantPace | None) -> GuardReading:
        tokens = int(self._random.poisson(mean_tokens))
        if tokens == 0:
            return GuardReading()
        noise = self.spread / math.sqrt(tokens)
        seconds = tokens * token_seconds * float(self._random.lognormal(-(noise**2) / 2, noise))
        if self._random.random() < self.spikes:
            seconds *= self._random.uniform(3, 10)
        if pace is None:
            return GuardReading(tokens=tokens, itl_seconds=seconds, steps=tokens)
        steps = max(1, round(tokens / (1 + pace.accepted)))
        found = int(self._random.poisson(pace.accepted * steps))
        guessable = steps if pace.sharing else 0
        counts = {"steps": steps, "guessable": guessable, "sharing": pace.sharing * steps, "accepted": found}
        return GuardReading(tokens=tokens, itl_seconds=seconds, **counts)


#: A guard has watched a good variant for so many seconds.
WARM = 600


def swings(now: float) -> float:
    """A load by which a step takes 0.5 to 2 times as long, in two minutes, with a jump at the end of each."""
    return 2 ** math.sin(2 * math.pi * (now % 110) / 120)


@cache
def _warmed(seed: int, noise: float) -> GuardTraffic:
    traffic = GuardTraffic(seed, spread=spread_of(noise), load=swings)
    assert traffic.run(WARM, GOOD) == []
    return traffic


def warm(seed: int, noise: float = 0.1) -> GuardTraffic:
    return copy.deepcopy(_warmed(seed, noise))


def cut(seed: int = 0, pace: VariantPace = SLOW) -> GuardTraffic:
    traffic = warm(seed)
    traffic.seconds_until("cut", pace, 60)
    assert traffic.state == "cut"
    return traffic


#: What is too long for the table.
MOST = 600
NOISES = (0.05, 0.1, 0.15, 0.2)
COLLAPSES = {
    "10 % slower": VariantPace(1.1),
    "20 % slower": VariantPace(1.2),
    "30 % slower": VariantPace(1.3),
    "50 % slower": VariantPace(1.5),
    "twice as slow": VariantPace(2.0),
    "a tenth of its acceptance, 10 % slower": UNACCEPTED,
}


def seconds_to_cut(watched: GuardTraffic, pace: VariantPace, seed: int) -> int:
    traffic = copy.deepcopy(watched)
    traffic.reseed(seed)
    return traffic.seconds_until("cut", pace, MOST)


def detection_table() -> Iterator[str]:
    """Lines of docs/rollout.md: seconds to a cut, of half the cases and of nine in ten."""
    watched = [[warm(seed, noise) for seed in range(4)] for noise in NOISES]
    for name, pace in COLLAPSES.items():
        cells = [_cell([seconds_to_cut(guards[i % 4], pace, i) for i in range(40)]) for guards in watched]
        yield f"| {name} | {' | '.join(cells)} |"


def _cell(seconds: list[int]) -> str:
    found = sorted(seconds)
    half, most = (found[math.ceil(share * len(found)) - 1] for share in (0.5, 0.9))
    return ", ".join("longer" if value >= MOST else str(value) for value in (half, most))
