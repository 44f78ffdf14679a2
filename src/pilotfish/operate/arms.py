from collections.abc import Callable
from math import log
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from pilotfish.operate.contrast import Contrast, Count, Moments
from pilotfish.operate.outcome import RequestOutcome

#: Variants whose requests are kept; requests of further ones count as left out.
MOST_ARMS = 32


def _log(value: float | None) -> float | None:
    return log(value) if value is not None and value > 0 else None


#: An observation of each measure; None: the request has none. Of times and speeds it is the natural logarithm, so that
#: differences are ratios. Failed requests count, or the variant whose slow requests are given up would look best.
MEASURES: dict[str, Callable[[RequestOutcome], float | None]] = {
    "itl": lambda outcome: _log(outcome.itl),
    "ttft": lambda outcome: _log(outcome.ttft),
    "tokens_per_second": lambda outcome: _log(outcome.tokens / outcome.latency) if outcome.latency > 0 else None,
    "tokens_per_step": lambda outcome: outcome.tokens / outcome.steps if outcome.steps else None,
    "valid": lambda outcome: None if outcome.valid is None else float(outcome.valid),
    "score": lambda outcome: outcome.score,
    "failed": lambda outcome: float(outcome.failed),
}


class Arm(Struct, kw_only=True):
    requests: Count = 0  # without those below
    tokens: Count = 0
    cut: Count = 0  # requests that ran without speculation because the variant was cut
    pinned: Count = 0  # requests whose tag chose the variant
    paused: bool = False  # the last request was cut: the holdout has no counterpart now
    moments: dict[str, Moments] = {}  # by measure
    contrasts: dict[str, Contrast] = {}  # by measure: beside the holdout; none of the holdout itself

    def merge(self, other: "Arm") -> None:
        for name in ("requests", "tokens", "cut", "pinned"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, moments in other.moments.items():
            self.moments.setdefault(name, Moments()).merge(moments)
        for name, contrast in other.contrasts.items():
            self.contrasts.setdefault(name, Contrast()).merge(contrast)


class RolloutArms(Struct, kw_only=True):
    holdout: str  # the name of a variant; "": there is none
    since: Annotated[float, Meta(ge=0, lt=1e11)]  # seconds since the epoch: when the first request may have ended
    sticky: Literal["client", "request"] = "request"  # what keeps its variant
    arms: dict[str, Arm] = field(default_factory=dict)  # by variant
    left_out: Count = 0  # requests of variants beyond `MOST_ARMS`

    @property
    def compared(self) -> list[str]:
        return [name for name in self.arms if name != self.holdout]

    def add(self, outcome: RequestOutcome) -> None:
        if (arm := self._arm(outcome.variant)) is None:
            self.left_out += 1
        elif outcome.pinned:
            arm.pinned += 1
        elif outcome.cut:
            arm.cut += 1
            arm.paused = True
        else:
            arm.requests += 1
            arm.tokens += outcome.tokens
            arm.paused = False
            for measure, observe in MEASURES.items():
                self._observe(outcome, arm, measure, observe(outcome))

    def add_score(self, outcome: RequestOutcome) -> None:
        arm = self.arms.get(outcome.variant)
        if arm is not None and not (outcome.pinned or outcome.cut):
            self._observe(outcome, arm, "score", outcome.score)

    def merge(self, other: "RolloutArms") -> None:
        self.since = min(self.since, other.since)
        self.left_out += other.left_out
        for name, arm in other.arms.items():
            if (own := self._arm(name)) is not None:
                own.merge(arm)
            else:
                self.left_out += arm.requests

    def _arm(self, variant: str) -> Arm | None:
        if variant not in self.arms and len(self.arms) < MOST_ARMS:
            self.arms[variant] = Arm()
        return self.arms.get(variant)

    def _observe(self, outcome: RequestOutcome, arm: Arm, measure: str, value: float | None) -> None:
        if value is None:
            return
        arm.moments.setdefault(measure, Moments()).add(value)
        if outcome.variant != self.holdout:
            arm.contrasts.setdefault(measure, Contrast()).add(outcome.ended, value)
        else:
            for other in (self.arms[name] for name in self.compared):
                if other.requests and not other.paused:
                    other.contrasts.setdefault(measure, Contrast()).add(outcome.ended, value, of_holdout=True)
