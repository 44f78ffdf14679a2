from collections import defaultdict
from functools import partial
from math import inf, log1p

from pilotfish.operate.guarding.change_detection import ChangeDetector, NoiseEstimate, RunningMean, SequentialTest
from pilotfish.operate.guarding.guard_readings import ENOUGH, NOTHING, Comparison, GuardReading, ReadingPairs


class AcceptanceDrop:
    """Whether a variant's accepted tokens a step fell below their own level of the last ten minutes, by more than
    harder prompts may explain. Each load has its own level: beside more sequences fewer guesses pay."""

    MEMORY = 600  # readings
    TOLERATED = 1.5  # times fewer

    def __init__(self) -> None:
        self.detector, self._noise = ChangeDetector(), NoiseEstimate()
        self._levels = defaultdict[int, RunningMean](partial(RunningMean, self.MEMORY))  # by load
        self._pending = NOTHING
        self.since = NOTHING  # what came since the drop is suspected, or the last of it

    @property
    def is_suspected(self) -> bool:
        return self.detector.evidence >= 1

    def observe(self, own: GuardReading) -> None:
        present = self._pending + own
        if present.guessable < ENOUGH:
            self._pending = present
            return
        self._pending = NOTHING
        self._compare(present)
        self.since = self.since + present if self.is_suspected else NOTHING

    def _compare(self, present: GuardReading) -> None:
        """A step gives 1 + accepted tokens, so a drop of its log is the variant's loss."""
        level, scale, tokens = self._levels[present.load], 1 / present.guessable, log1p(present.acceptance)
        if level.weight:
            excess = log1p(level.value / self.TOLERATED) - tokens
            self.detector.observe(excess, [scale * v for v in self._noise.variances])
            self._noise.observe(tokens - log1p(level.value), scale)
        level.observe(present.acceptance)

    def __str__(self) -> str:
        before = self._levels[self.since.load].value
        return f"{self.since.acceptance:.2f} accepted tokens a step, {before:.2f} before"


class VariantEvidence:
    """Noise and the overhead of steps are kept for good; evidence starts anew with `start`."""

    MEMORY = 60  # readings: of the overhead

    def __init__(self, allowance: float) -> None:
        """A live variant may take (1 + `allowance`) times the holdout's time a token."""
        self._allowance = log1p(allowance)
        self._noise = NoiseEstimate()
        self._overhead = RunningMean(self.MEMORY)  # the logarithm of a variant's time a *step* over the holdout's
        self.start()

    def start(self) -> None:
        self._pairs, self._slower, self._acceptance = ReadingPairs(), ChangeDetector(), AcceptanceDrop()
        self._trial = SequentialTest(self._allowance, self._allowance)
        self._figures: Comparison | None = None  # of the trial, or since a live variant seems slower
        self._since_drop: Comparison | None = None

    @property
    def figures(self) -> str:
        return str(self._figures)

    def collapse(self, own: GuardReading, holdout: GuardReading) -> str:
        self._acceptance.observe(own)
        if (compared := self._pairs.add(own, holdout)) is not None:
            self._compare(compared)
        if self._slower.is_detected:
            return self.figures
        if self._acceptance.detector.is_detected and self._slowdown_since_drop() > -self._allowance:
            return f"{self._acceptance}; no longer faster than the holdout: {self._since_drop or 'which is silent'}"
        return ""

    def is_slower(self, own: GuardReading, holdout: GuardReading) -> bool | None:
        """In a trial; None: not yet decided."""
        if (compared := self._pairs.add(own, holdout)) is not None:
            self._figures = compared.joined(self._figures)
            slowdown = compared.unbiased_slowdown(self._noise.variances[0])
            self._trial.observe(slowdown, compared.scale * self._noise.variances[-1])
            self._noise.observe(slowdown, compared.scale)
        return self._trial.is_above

    def _compare(self, compared: Comparison) -> None:
        self._figures = compared.joined(self._figures if self._slower.evidence >= 1 else None)
        self._since_drop = compared.joined(self._since_drop) if self._acceptance.is_suspected else None
        slowdown, scale = compared.unbiased_slowdown(self._noise.variances[0]), compared.scale
        self._slower.observe(slowdown - self._allowance, [scale * v for v in self._noise.variances])
        self._noise.observe(slowdown, scale)
        self._overhead.observe(slowdown + compared.own.log_step_tokens)

    def _slowdown_since_drop(self) -> float:
        """If the holdout is silent, its step is taken to be shorter than the variant's by the known overhead."""
        if self._since_drop is not None:
            return self._since_drop.slowdown
        return self._overhead.value - self._acceptance.since.log_step_tokens if self._overhead.weight else -inf
