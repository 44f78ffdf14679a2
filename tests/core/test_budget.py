"""The budget in virtual time: near the best fixed choice whatever forwards cost and however good the draft is."""

import math
from bisect import bisect
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import accumulate, product

import numpy as np
import pytest
from sizes import paired, sized

from pilotfish.core.drafting.drafter import DraftLimits
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.budget import AdaptiveBudget, Budget, Effort, FixedBudget, StepLoad, StepTime
from pilotfish.core.scheduling.calibration import ContextCosts, StepCosts
from pilotfish.core.scheduling.request import Request
from pilotfish.core.scheduling.step import Chunk, RequestCommit, Step
from pilotfish.core.trees.tree import ROOT, Forest, Guesses, best

NODES, LEVELS, WIDTH = 8, 8, 4
#: Seconds of a forward by rows and of a level, and a chance.
Draft = tuple[tuple[Callable[[int], float], float], float]
#: Rows that trees may have, where nothing binds them.
ROOM = 4096


@dataclass
class Device:
    """A target, and a draft whose first child of a node is right with the first of `chances` (and says so, to the power
    of `bias`), its second with the second: with one of them it grows chains. A level expands `WIDTH` nodes."""

    forward: Callable[[int], float]  # seconds by rows
    level: float  # seconds of a draft forward
    chances: tuple[float, ...]
    bias: float = 1.0
    blocks: bool = False  # whether a forward gives all levels
    reads: float = 0.0  # seconds of the draft for each token that was written while it rested, up to 200 of a sequence
    lag: float | None = None  # of a draft elsewhere: it reads for as long as it rested, but for at most these seconds
    unread: int = 0
    now: float = 0.0
    rested: float | None = 0.0  # since when a draft elsewhere is not asked; None: it is
    has_read: float = 0.0  # when it has read what was written meanwhile
    tokens: int = 0
    drafted: int = 0
    steps: int = 0
    choices: list[tuple[float, object]] = field(default_factory=list)
    grown: dict[object, list[tuple[Guesses, float]]] = field(default_factory=dict)  # by nodes, chances and bias
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def step(self, budget: Budget, sequences: int) -> None:
        """One step as the target worker takes it."""
        load = StepLoad(sequences, sequences, ROOM)
        limits = budget.limits(load, self.now)
        tree, levels = self._grow(limits, sequences)
        if self.lag is not None:
            tree, levels = self._pushed(tree, self.lag), 0
        draft_seconds = levels * self.level + (self.unread * self.reads if levels else 0.0)
        grown = Forest.of(self._trees(tree, sequences))
        nodes = budget.nodes(load, grown, draft_seconds, levels)
        step = _step(grown.take(best(grown.nodes.scores, nodes)))
        forest = step.forest
        nodes_of = zip(*map(np.ndarray.tolist, (forest.owners, forest.nodes.parents, forest.nodes.tokens)), strict=True)
        numbers = {node: number for number, node in enumerate(nodes_of)}
        commits = [self._commit(chunk.request, tree, numbers) for tree, chunk in enumerate(step.chunks)]
        seconds = self.forward(step.num_rows)
        rest = seconds * float(self.rng.uniform(0.95, 1.05))
        budget.observe(step, commits, StepTime(load, limits, draft_seconds, rest))
        self.now += draft_seconds + seconds
        self.tokens += (tokens := sum(len(commit.tokens) for commit in commits))
        self.unread = tokens if levels else min(self.unread + tokens, 200 * sequences)
        self.drafted += levels > 0
        self.steps += 1
        if isinstance(budget, AdaptiveBudget) and (not self.choices or self.choices[-1][1] != budget.choice):
            self.choices.append((self.now, budget.choice))

    def _trees(self, tree: Guesses, sequences: int) -> list[Guesses]:
        return [tree] * sequences

    def _pushed(self, tree: Guesses, lag: float) -> Guesses:
        if not tree:
            self.rested = self.now if self.rested is None else self.rested
        elif self.rested is not None:
            self.has_read, self.rested = self.now + min(lag, self.now - self.rested), None
        return tree if self.now >= self.has_read else Guesses()

    def _grow(self, limits: DraftLimits, sequences: int) -> tuple[Guesses, int]:
        """As a draft in the target's process does, while it pays: the tree that all sequences get, and its forwards."""
        if not limits.levels:
            return Guesses(), 0
        nodes = min(limits.nodes, -(-limits.total // sequences))
        key = nodes, self.chances, self.bias
        grown = self.grown.get(key) or self.grown.setdefault(key, list(self._levels(nodes)))
        least, levels, most = limits.price * self.level / sequences, 0, min(limits.levels, len(grown) - 1)
        while levels < most and (not levels or self.blocks or grown[levels][1] >= least):
            levels += 1
        return grown[levels][0], min(levels, 1) if self.blocks else levels

    def _levels(self, nodes: int) -> Iterator[tuple[Guesses, float]]:
        """The tree after so many levels, and the tokens that a further one promises."""
        tree, expected, gained = Guesses(), 0.0, math.inf
        for _ in range(LEVELS + 1):
            leaves = self._leaves(tree, nodes)
            yield deepcopy(tree.best(nodes)), min(gained, sum(math.exp(_score(tree, leaf)) for leaf in leaves))
            if not leaves:
                break
            self._expand(tree, leaves)
            before, expected = expected, sum(map(math.exp, sorted(tree.scores)[-nodes:]))
            gained = expected - before

    def _leaves(self, tree: Guesses, nodes: int) -> list[int]:
        """The best to expand, of those whose children could be among so many nodes."""
        floor = sorted(tree.scores, reverse=True)[nodes - 1] if len(tree) >= nodes else -math.inf
        leaves = [node for node in range(ROOT, len(tree)) if node not in tree.parents and _score(tree, node) > floor]
        return sorted(leaves, key=lambda leaf: -_score(tree, leaf))[:WIDTH]

    def _expand(self, tree: Guesses, leaves: list[int]) -> None:
        for leaf in leaves:
            for child, chance in enumerate(self.chances):
                tree.add(leaf, child, _score(tree, leaf) + self.bias * math.log(chance))

    def _commit(self, request: Request, tree: int, numbers: dict[tuple[int, int, int], int]) -> RequestCommit:
        """`numbers` of nodes by tree, parent and token."""
        path, last, right = list[int](), ROOT, list(accumulate(self.chances))
        while (node := numbers.get((tree, last, bisect(right, self.rng.random())))) is not None:
            path.append(last := node)
        return RequestCommit(request, [1] * len(path) + [2], path)


def _score(tree: Guesses, node: int) -> float:
    return 0.0 if node == ROOT else tree.scores[node]


CHUNKS = [Chunk(Request(number, [1], SamplingParams(), 0, frozenset(), 100), 1) for number in range(32)]


def _step(forest: Forest) -> Step:
    """Of one row of each sequence, and the trees."""
    count, slots = forest.num_trees, np.zeros(1, np.int32)
    whole = [True] * count, [range(0)] * count, [slots] * count
    return Step(CHUNKS[:count], *whole, forest, np.zeros(len(forest), np.int32))


STEP = _step(Forest.of([Guesses()]))


def test_what_a_long_context_costs_is_no_cost_of_rows() -> None:
    costs = StepCosts({1: 1e-3, 64: 2e-3}, context=ContextCosts(first=1e-7))
    budget, rows = AdaptiveBudget(NODES, LEVELS, costs, 1e-4), np.arange(1, 65)
    before = costs.over(rows)
    for turn in range(60):
        load = StepLoad(1, 1, ROOM, context=100_000 * (turn % 2))
        limits = budget.limits(load, 0.01 * turn)
        budget.observe(STEP, [], StepTime(load, limits, 0.0, 1e-3 + 1e-7 * load.context))
    assert costs.over(rows) == pytest.approx(before)
    for _ in range(500):  # as where sequences share a prefix that is counted for each
        load = replace(load, context=10**8)
        budget.observe(STEP, [], StepTime(load, budget.limits(load, 0.0), 0.0, 2e-3))
    assert 1e-3 < costs.at(1) + costs.context.seconds(10**8, 0) < 4e-3


def speed(budget: Budget, device: Device, sequences: int, steps: int = sized(600, 900)) -> float:
    """Tokens a second after a third of the steps."""
    for _ in range(steps // 3):
        device.step(budget, sequences)
    now, tokens = device.now, device.tokens
    for _ in range(2 * steps // 3):
        device.step(budget, sequences)
    return (device.tokens - tokens) / (device.now - now)


def adaptive(device: Device, error: float = 1.0, nodes: int = NODES) -> AdaptiveBudget:
    """Knows the device's costs up to a factor."""
    costs = StepCosts({rows: device.forward(rows) * error for rows in (1, 2, 4, 8, 12, 16, 32, 64, 128, 256)})
    return AdaptiveBudget(nodes, LEVELS, costs, device.level)


#: Seconds by rows: weights dominate up to 8 rows; so they do, and later rows cost less; every row costs; no row costs;
#: a target hardly larger than its draft.
FLAT: Callable[[int], float] = lambda rows: 0.023 + 0.0018 * max(rows - 8, 0)  # noqa: E731
GENTLE: Callable[[int], float] = lambda rows: 0.02 + 0.0004 * max(rows - 8, 0)  # noqa: E731
BOUND: Callable[[int], float] = lambda rows: 0.002 + 0.004 * rows  # noqa: E731
PACED: Callable[[int], float] = lambda _: 0.02  # noqa: E731
SMALL: Callable[[int], float] = lambda rows: 0.0009 + 0.00004 * rows  # noqa: E731


def best_fixed(device: Device, sequences: int, most: int = NODES) -> float:
    """Tokens a second of the best number of nodes and levels."""

    def at(nodes: int, levels: int) -> float:
        tree, taken = device._grow(DraftLimits(nodes, nodes * sequences, levels, 0.0), sequences)
        tokens = sequences * (1 + sum(math.exp(score / device.bias) for score in tree.scores))
        return tokens / (device.forward(sequences * (1 + len(tree))) + taken * device.level)

    return max(at(nodes, levels) for nodes in range(most + 1) for levels in range(min(nodes, LEVELS) + 1))


COSTS = [(FLAT, 0.0006), (BOUND, 0.0005), (SMALL, 0.0008)]


@pytest.mark.parametrize(("draft", "sequences"), paired([*product(COSTS, [0.85, 0.6, 0.15])], [1, 4, 32, 8]))
def test_it_is_near_the_best_fixed_choice(draft: Draft, sequences: int) -> None:
    (forward, level), chance = draft
    device = Device(forward, level, (chance,))
    budget = adaptive(device)
    got = speed(budget, device, sequences)
    assert got > 0.95 * best_fixed(device, sequences), device.choices
    assert budget.changes <= 1 + device.now / AdaptiveBudget.DWELL


@pytest.mark.parametrize("draft", [*product(COSTS, [0.4, 2.5])])
def test_a_draft_may_believe_too_much_or_too_little(draft: Draft) -> None:
    (forward, level), bias = draft
    device = Device(forward, level, (0.7,), bias)
    assert speed(adaptive(device), device, 4) > 0.95 * best_fixed(device, 4), device.choices


@pytest.mark.parametrize("chances", [(0.6, 0.15, 0.05), (0.45, 0.15, 0.08, 0.05)])
@pytest.mark.parametrize(("costs", "blocks"), [((FLAT, 0.0012), False), ((PACED, 0.004), True), ((FLAT, 0.004), True)])
def test_a_level_may_give_many_nodes(
    costs: tuple[Callable[[int], float], float], blocks: bool, chances: tuple[float, ...]
) -> None:
    """Trees of few levels, and a forward for all of them: nodes cost rows, levels the draft's time."""
    for sequences in sized([len(chances) - 2], [1, 4]):
        device = Device(*costs, chances, blocks=blocks)
        got = speed(adaptive(device, nodes=16), device, sequences, 600)
        assert got > 0.93 * best_fixed(device, sequences, 16), device.choices


def test_full_trees_are_tried_again_where_small_ones_were_best() -> None:
    device = Device(FLAT, 0.0012, (0.1, 0.05))
    budget = adaptive(device, nodes=16)
    for _ in range(300):
        device.step(budget, 1)
    assert budget.choice.bucket < 4
    device.chances = (0.6, 0.3)
    for _ in range(sized(900, 1500)):
        device.step(budget, 1)
    assert budget.choice.bucket >= 6


def test_wrong_beliefs_about_costs_are_corrected() -> None:
    for error in (0.3, 3.0):
        device = Device(SMALL, 0.0008, (0.8,))
        budget = adaptive(device, error)
        assert speed(budget, device, 4, sized(1800, 3000)) > 0.95 * best_fixed(device, 4), device.choices


def test_a_draft_that_is_replaced_by_a_wrong_one_leaves_and_a_right_one_comes_back() -> None:
    """Each is sure of its first nodes. What was learned of how often the wrong one is right must not last."""
    sequences, steps, device = 8, sized(1200, 3000), Device(FLAT, 0.001, (0.85,))
    budget = adaptive(device)
    assert speed(budget, device, sequences, steps) > 0.95 * best_fixed(device, sequences)
    device.chances, device.bias = (0.05,), math.log(0.85) / math.log(0.05)
    began, tokens = device.now, device.tokens
    speed(budget, device, sequences, steps)
    assert budget.choice.effort is Effort.NONE
    assert (device.tokens - tokens) / (device.now - began) > 0.98 * sequences / FLAT(sequences)
    device.chances, device.bias = (0.85,), 1.0
    assert speed(budget, device, sequences, steps) > 0.95 * best_fixed(device, sequences), device.choices


def test_trials_of_a_draft_that_reads_long_are_rarer_still() -> None:
    """It takes 0.06 ms to read each token that 32 sequences of 200 wrote meanwhile."""
    device = Device(FLAT, 0.004, (0.05,), reads=0.00006)
    budget, rested = adaptive(device), Device(FLAT, 0.004, (0.05,))
    got, plain = speed(budget, device, 32, sized(1000, 1800)), 32 / FLAT(32)
    assert got > 0.98 * plain
    assert speed(adaptive(rested), rested, 32, sized(1000, 1800)) > 0.98 * plain
    assert 0 < device.drafted < rested.drafted


@pytest.mark.parametrize("lag", [0.0, 0.3, 1.5])
def test_a_right_draft_elsewhere_comes_back_although_it_reads_for_longer_than_a_trials_steps(lag: float) -> None:
    sequences, steps = 8, sized(1200, 3000)
    device = Device(FLAT, 0.0, (0.05,), math.log(0.85) / math.log(0.05), lag=lag)
    budget = adaptive(device)
    assert speed(budget, device, sequences, steps) > 0.98 * sequences / FLAT(sequences)
    assert budget.choice.effort is Effort.NONE
    device.chances, device.bias = (0.85,), 1.0
    assert speed(budget, device, sequences, steps) > 0.95 * best_fixed(device, sequences), device.choices


class UnlikeDrafts(Device):
    """Elsewhere: all sequences but the first get their trees, in turn, from nobody and from a draft that is rarely
    right, and says so."""

    def _trees(self, tree: Guesses, sequences: int) -> list[Guesses]:
        poor = deepcopy(tree)
        poor.scores = [-3.0 * depth for depth in poor.depths]
        return [[Guesses(), poor][number % 2] if number else tree for number in range(sequences)]

    def _grow(self, limits: DraftLimits, sequences: int) -> tuple[Guesses, int]:
        """Each offers whole trees: the budget takes the best nodes of all."""
        return super()._grow(replace(limits, total=limits.nodes * sequences), sequences)

    def _commit(self, request: Request, tree: int, numbers: dict[tuple[int, int, int], int]) -> RequestCommit:
        before = self.chances
        self.chances = before if tree == 0 else (0.05,)
        try:
            return super()._commit(request, tree, numbers)
        finally:
            self.chances = before


@pytest.mark.parametrize("sequences", [8, 16])
def test_one_good_draft_among_poor_ones_is_used(sequences: int) -> None:
    """Its sequence alone pays for the rows, however little a tree is worth in the mean."""
    device = UnlikeDrafts(GENTLE, 0.0, (0.85,), lag=0.0)
    got = speed(adaptive(device), device, sequences, sized(1200, 3000))
    gained = sum(0.85**depth for depth in range(1, NODES + 1))
    assert got > 0.95 * (sequences + gained) / GENTLE(sequences + NODES), device.choices


class AbsentDraft(Device):
    def _pushed(self, tree: Guesses, lag: float) -> Guesses:  # noqa: ARG002
        return Guesses()


def test_a_draft_elsewhere_that_never_comes_is_awaited_a_bounded_time() -> None:
    device = AbsentDraft(FLAT, 0.0, (0.85,), lag=0.0)
    budget = adaptive(device)
    assert speed(budget, device, 8) > 0.98 * 8 / FLAT(8)
    assert budget.choice.effort is Effort.NONE, device.choices


def test_prompts_between_lengthen_no_wait_for_a_draft_elsewhere() -> None:
    device = AbsentDraft(FLAT, 0.0, (0.85,), lag=0.0)
    budget = adaptive(device)
    for _ in range(400):
        device.step(budget, 8)
        budget.limits(StepLoad(8, 256, 0), device.now)
    assert budget.choice.effort is Effort.NONE, device.choices


def test_nothing_is_drafted_where_prompts_take_all_rows() -> None:
    """Nor is a trial spent on it."""
    device = Device(FLAT, 0.001, (0.8,))
    budget = adaptive(device)
    for step in range(2 * budget.FIRST_STEPS):
        for load in (StepLoad(2, 256, 0), StepLoad(0, 256, ROOM)):  # none samples
            assert budget.limits(load, 0.01 * step).levels == 0
            assert budget.nodes(load, Forest.of([]), 0.0, 0) == 0
    assert budget.limits(StepLoad(2, 2, ROOM), 1.0).levels == LEVELS, "the trial of the start is still to come"


def test_choices_do_not_oscillate_between_equals() -> None:
    """A draft that costs just what it gives."""
    device = Device(lambda rows: 0.001 * rows, 0.0, (0.5,))
    budget = adaptive(device)
    for _ in range(sized(2000, 5000)):
        device.step(budget, 4)
    assert budget.changes < 8


def test_a_fixed_budget_takes_all_of_it() -> None:
    budget = FixedBudget(6, 3)
    assert budget.limits(StepLoad(2, 2, ROOM), 0.0).levels == 3
    assert budget.nodes(StepLoad(2, 2, ROOM), Forest.of([]), 9.9, 3) == 12


def test_prompts_sway_no_choice() -> None:
    """A step with a long prompt costs so much that guesses beside it look free: they are not in the steps after it."""
    device = Device(SMALL, 0.0008, (0.8,))
    budget = adaptive(device)
    for _ in range(300):
        device.step(budget, 4)
    before = budget.choice
    assert before.effort is Effort.NONE
    for sequences in (3, 4, 3, 4):
        device.now += 0.01
        budget.limits(StepLoad(sequences, 256, ROOM), device.now)
    assert budget.choice == before
