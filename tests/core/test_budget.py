"""The budget in virtual time: near the best fixed choice whatever forwards cost and however good the draft is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest

from pilotfish.core.budget import AdaptiveBudget, Budget, Effort, FixedBudget, StepLoad
from pilotfish.core.calibration import StepCosts
from pilotfish.core.request import Request
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.core.step import Chunk, RequestCommit, Step
from pilotfish.core.tree import OTHER, Forest, Guesses

NODES, LEVELS = 8, 8
PARAMS = SamplingParams()


@dataclass
class Device:
    """A target, a draft that is right with `chance` at each node (and says so, to the power of `bias`)."""

    forward: Callable[[int], float]  # seconds by rows
    level: float  # seconds of a draft forward
    chance: float
    bias: float = 1.0
    now: float = 0.0
    tokens: int = 0
    drafted: int = 0
    steps: int = 0
    choices: list[tuple[float, object]] = field(default_factory=list)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def step(self, budget: Budget, sequences: int) -> None:
        """One step as the target worker takes it."""
        load = StepLoad(sequences, sequences)
        limits = budget.limits(load, self.now)
        depth = 0
        while depth < min(limits.levels, limits.nodes):  # as the LM drafter goes on while it pays
            if depth * sequences >= limits.total:
                break
            if depth and sequences * self.chance ** (self.bias * depth) < limits.price * self.level:
                break
            depth += 1
        draft_seconds = depth * self.level
        grown = Forest.of([self._chain(depth)] * sequences)
        nodes = budget.nodes(load, grown, draft_seconds, depth)
        step = _step(grown.take(grown.nodes.best(nodes)))
        spans = pairwise(step.forest.starts.tolist())
        commits = [self._commit(chunk.request, *span) for chunk, span in zip(step.chunks, spans, strict=True)]
        seconds = self.forward(step.num_rows)
        budget.observe(step, commits, seconds * float(self.rng.uniform(0.95, 1.05)))
        self.now += draft_seconds + seconds
        self.tokens += sum(len(commit.tokens) for commit in commits)
        self.drafted += depth > 0
        self.steps += 1
        if isinstance(budget, AdaptiveBudget) and (not self.choices or self.choices[-1][1] != budget.choice):
            self.choices.append((self.now, budget.choice))

    def _chain(self, depth: int) -> Guesses:
        return Guesses.chain([1] * depth, [math.log(self.chance) * self.bias * (d + 1) for d in range(depth)], OTHER)

    def _commit(self, request: Request, first: int, end: int) -> RequestCommit:
        path = list[int]()
        while first + len(path) < end and self.rng.random() < self.chance:
            path.append(first + len(path))
        return RequestCommit(request, [1] * len(path) + [2], path)


def _step(forest: Forest) -> Step:
    """Of one row of each sequence, and the trees."""
    count, slots = forest.num_trees, np.zeros(1, np.int32)
    chunks, samples = [Chunk(_request(i), 1) for i in range(count)], np.ones(count, np.bool_)
    return Step(chunks, samples, [range(0)] * count, [slots] * count, forest, np.zeros(len(forest), np.int32))


def _request(number: int) -> Request:
    return Request(number, [1], PARAMS, 0, frozenset(), 100)


def speed(budget: Budget, device: Device, sequences: int, steps: int = 900) -> float:
    """Tokens a second after a third of the steps."""
    for _ in range(steps // 3):
        device.step(budget, sequences)
    now, tokens = device.now, device.tokens
    for _ in range(2 * steps // 3):
        device.step(budget, sequences)
    return (device.tokens - tokens) / (device.now - now)


def adaptive(device: Device, error: float = 1.0) -> AdaptiveBudget:
    """Knows the device's costs up to a factor."""
    costs = StepCosts({rows: device.forward(rows) * error for rows in (1, 2, 4, 8, 12, 16, 32, 64, 128, 256)})
    return AdaptiveBudget(NODES, LEVELS, costs, device.level)


#: Seconds by rows: weights dominate up to 8 rows; every row costs; a target hardly larger than its draft.
FLAT: Callable[[int], float] = lambda rows: 0.023 + 0.0018 * max(rows - 8, 0)  # noqa: E731
BOUND: Callable[[int], float] = lambda rows: 0.002 + 0.004 * rows  # noqa: E731
SMALL: Callable[[int], float] = lambda rows: 0.0009 + 0.00004 * rows  # noqa: E731


def best_fixed(device: Device, sequences: int) -> float:
    """Tokens a second of the best chain length."""

    def at(nodes: int) -> float:
        tokens = sequences * sum(device.chance**depth for depth in range(nodes + 1))
        return tokens / (device.forward(sequences * (1 + nodes)) + nodes * device.level)

    return max(at(nodes) for nodes in range(NODES + 1))


@pytest.mark.parametrize("sequences", [1, 4, 32])
@pytest.mark.parametrize("chance", [0.85, 0.6, 0.15])
@pytest.mark.parametrize(("forward", "level"), [(FLAT, 0.0006), (BOUND, 0.0005), (SMALL, 0.0008)])
def test_it_is_near_the_best_fixed_choice(
    forward: Callable[[int], float], level: float, chance: float, sequences: int
) -> None:
    device = Device(forward, level, chance)
    budget = adaptive(device)
    got = speed(budget, device, sequences)
    assert got > 0.95 * best_fixed(device, sequences), device.choices
    assert budget.changes <= 1 + device.now / AdaptiveBudget.DWELL


@pytest.mark.parametrize("bias", [0.4, 2.5])
@pytest.mark.parametrize(("forward", "level"), [(FLAT, 0.0006), (BOUND, 0.0005), (SMALL, 0.0008)])
def test_a_draft_may_believe_too_much_or_too_little(forward: Callable[[int], float], level: float, bias: float) -> None:
    device = Device(forward, level, 0.7, bias)
    assert speed(adaptive(device), device, 4) > 0.95 * best_fixed(device, 4), device.choices


def test_wrong_beliefs_about_costs_are_corrected() -> None:
    for error in (0.3, 3.0):
        device = Device(SMALL, 0.0008, 0.8)
        budget = adaptive(device, error)
        assert speed(budget, device, 4, 6000) > 0.95 * best_fixed(device, 4), device.choices


def test_a_draft_that_becomes_good_comes_back() -> None:
    device = Device(FLAT, 0.004, 0.05)
    budget = adaptive(device)
    for _ in range(300):
        device.step(budget, 2)
    assert budget.choice.effort is not Effort.DRAFT
    device.chance = 0.9
    for _ in range(1500):
        device.step(budget, 2)
    assert budget.choice.effort is Effort.DRAFT


def test_probes_are_rare_while_nothing_pays() -> None:
    device = Device(BOUND, 0.004, 0.05)
    budget = adaptive(device)
    for _ in range(2000):
        device.step(budget, 8)
    assert 0 < device.drafted < 0.02 * device.steps + 3 * budget.PROBE_STEPS


def test_choices_do_not_oscillate_between_equals() -> None:
    """A draft that costs just what it gives."""
    device = Device(lambda rows: 0.001 * rows, 0.0, 0.5)
    budget = adaptive(device)
    for _ in range(5000):
        device.step(budget, 4)
    assert budget.changes < 8


def test_nothing_samples_nothing_is_decided() -> None:
    budget = adaptive(Device(FLAT, 0.001, 0.5))
    before = budget.choice
    assert budget.limits(StepLoad(0, 256), 0.0).nodes == 0
    assert budget.nodes(StepLoad(0, 256), Forest.of([]), 0.0, 0) == 0
    assert budget.choice is before


def test_a_fixed_budget_takes_all_of_it() -> None:
    budget = FixedBudget(6, 3)
    assert budget.limits(StepLoad(2, 2), 0.0).levels == 3
    assert budget.nodes(StepLoad(2, 2), Forest.of([]), 9.9, 3) == 12


def test_prompts_sway_no_choice() -> None:
    """A step with a long prompt costs so much that guesses beside it look free: they are not in the steps after it."""
    device = Device(SMALL, 0.0008, 0.8)
    budget = adaptive(device)
    for _ in range(300):
        device.step(budget, 4)
    before = budget.choice
    assert before.effort is Effort.NONE
    for sequences in (3, 4, 3, 4):
        device.now += 0.01
        budget.limits(StepLoad(sequences, 256), device.now)
    assert budget.choice == before
