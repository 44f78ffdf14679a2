"""Traffic of which it is known why acceptance changes: requests drawn from shares of cohorts, chances of guesses."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from pilotfish.operate.explaining.cohorts import Cell, CohortWindows
from pilotfish.operate.outcome import Cohort, RequestOutcome

HOUR = 3600.0
#: Depths that a tree has.
DEEP = 5
#: What is usual: how often each value occurs, by dimension.
USUAL: Mapping[str, Mapping[str, float]] = {
    "variant": {"on": 0.95, "off": 0.05},
    "tag": {"chat": 0.5, "code": 0.3, "summary": 0.2},
    "output": {"text": 0.8, "json": 0.1, "tools": 0.1},
    "temperature": {"0": 0.5, "<=0.5": 0.1, "<=1": 0.4},
    "context": {"64": 0.2, "256": 0.5, "1024": 0.25, "4096": 0.05},
    "script": {"latin": 0.9, "han": 0.1},
    "client": {"acme": 0.4, "bolt": 0.35, "corp": 0.25},
    "draft": {"r1": 0.7, "r2": 0.3},
}
#: By how much the chance of a guess to be right is multiplied.
EASE: Mapping[tuple[str, str], float] = {
    ("tag", "code"): 1.15,
    ("tag", "summary"): 0.9,
    ("output", "json"): 0.75,
    ("output", "tools"): 0.85,
    ("temperature", "<=1"): 0.8,
    ("context", "1024"): 0.9,
    ("context", "4096"): 0.7,
    ("script", "han"): 0.9,
}


@dataclass(frozen=True)
class Traffic:
    """An hour's. Dimensions are independent of each other but where they are `tied`."""

    shares: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # where they are not as USUAL
    ease: Mapping[tuple[str, str], float] = field(default_factory=dict)  # likewise
    late_at: Mapping[tuple[str, str], float] = field(default_factory=dict)  # where it is not `late`
    tied: Mapping[str, tuple[str, Mapping[str, str]]] = field(default_factory=dict)  # to another's values: which follow
    right: float = 0.7  # the chance of a first guess
    late: float = 0.05
    wanted: float = 0.95
    load: int = 8  # sequences a step
    requests: int = 2000

    def outcomes(self, seed: int, begin: float = 0.0) -> list[RequestOutcome]:
        """`begin`: seconds since the epoch."""
        chance = np.random.default_rng(seed)
        values = self._values(chance)
        steps = 1 + chance.geometric(1 / 40, self.requests)
        wanted = chance.binomial(steps, np.where(values["variant"] == "off", 0.0, self.wanted))
        trees = chance.binomial(wanted, 1 - self._late(values))
        right = self._right(values, chance)
        reached = [trees]
        for depth in range(DEEP):
            reached.append(chance.binomial(reached[-1], np.clip(right - 0.03 * depth, 0, 1)))
        return self._told(begin, values, steps, wanted, np.array(reached))

    def _values(self, chance: np.random.Generator) -> dict[str, np.ndarray]:
        values = {}
        for name, usual in USUAL.items():
            shares = self.shares.get(name, usual)
            values[name] = chance.choice(list(shares), self.requests, p=list(shares.values()))
        for name, (other, follows) in self.tied.items():
            values[name] = np.array([follows[value] for value in values[other]])
        return values

    def _late(self, values: dict[str, np.ndarray]) -> np.ndarray:
        late = np.full(self.requests, self.late)
        for (name, value), share in self.late_at.items():
            late[values[name] == value] = share
        return late

    def _right(self, values: dict[str, np.ndarray], chance: np.random.Generator) -> np.ndarray:
        """Requests differ by more than their cohorts."""
        right = self.right * chance.beta(40, 4, self.requests) * 44 / 40
        for (name, value), ease in {**EASE, **self.ease}.items():
            right[values[name] == value] *= ease
        return right

    def _told(
        self,
        begin: float,
        values: dict[str, np.ndarray],
        steps: np.ndarray,
        wanted: np.ndarray,
        reached: np.ndarray,  # [depths, requests]: trees whose path was accepted up to there
    ) -> list[RequestOutcome]:
        accepted = reached[1:].sum(axis=0)
        columns = {"steps": steps, "trees": reached[0], "late": wanted - reached[0], "accepted": accepted}
        columns |= {"guessable": steps, "sharing": self.load * steps}
        columns |= {"tokens": steps + accepted, "nodes": 8 * reached[0], "variant": values["variant"]}
        columns |= {"tried_by_depth": reached[:-1].T, "accepted_by_depth": reached[1:].T}
        names = Cohort.__struct_fields__
        cohorts = zip(*(values[name].tolist() for name in names), strict=True)
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        return [
            RequestOutcome(
                ended=begin + HOUR * place / self.requests,
                cohort=Cohort(**dict(zip(names, cohort, strict=True))),
                **dict(zip(columns, row, strict=True)),
            )
            for place, (cohort, row) in enumerate(zip(cohorts, rows, strict=True))
        ]


def counted(outcomes: Iterable[RequestOutcome]) -> CohortWindows:
    windows = CohortWindows()
    for outcome in outcomes:
        windows.add(outcome)
    return windows


def cells_of(traffic: Traffic, seed: int) -> list[Cell]:
    """Of its hour."""
    return counted(traffic.outcomes(seed)).told(HOUR).between(0.0, HOUR)
