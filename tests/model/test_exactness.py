"""Speculation draws from the target's distribution, exactly: 200,000 seeds, and wrong rules are caught."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from scipy import stats
from support import RowSampling, random_tree, reference_probs, sampling_of

from pilotfish.core.sampling_params import SamplingParams
from pilotfish.core.tree import ROOT, Forest, TokenTree, TreeBuilder, walk
from pilotfish.model.native import load_kernels
from pilotfish.model.sampling import filtered, sample

NUM_SEEDS = 200_000
LENGTH = 3
Path = tuple[int, ...]
#: The tree below `prefix` for the i-th seed, and what commits tokens of it.
Trees = Callable[[Path, int], TokenTree]
Walks = list[tuple[TokenTree, Path, int]]  # a tree, the tokens before it, the number of a seed
Rule = Callable[["World", Walks], list[list[int]]]

SEEDS = np.random.default_rng(2).integers(0, 1 << 64, NUM_SEEDS, dtype=np.uint64)


class World:
    """A random target over a small vocabulary: any distribution after any prefix, and a draft near it."""

    def __init__(self, vocab: int, params: SamplingParams, seeds: np.ndarray = SEEDS) -> None:
        self.vocab, self.params, self.seeds = vocab, params, seeds
        rng = np.random.default_rng(vocab)
        prefixes = [p for n in range(LENGTH) for p in itertools.product(range(vocab), repeat=n)]
        self.target = {p: torch.tensor(rng.normal(0, 1.5, (1, vocab))) for p in prefixes}
        self.draft = {p: x + torch.tensor(rng.normal(0, 0.7, (1, vocab))) for p, x in self.target.items()}
        self.target_probs = {p: reference_probs(x[0].numpy(), params) for p, x in self.target.items()}
        self.draft_probs = {p: reference_probs(x[0].numpy(), params) for p, x in self.draft.items()}
        self.uniform = random.Random(vocab).random

    def _topk(self, logits: torch.Tensor, position: int, k: int, salt: int = 0) -> list[list[int]]:
        """perturbed_topk for every seed, less the cost of 200,000 objects a call."""
        scores = filtered(logits, sampling_of([RowSampling(self.params, 0, 0)])).expand(len(self.seeds), -1)
        seeds = torch.from_numpy((self.seeds ^ np.uint64(salt)).view(np.int64))
        _, tokens = torch.ops.pilotfish.perturbed_topk(scores, seeds, torch.full_like(seeds, position), k)
        return tokens.T.tolist() if k == 1 else tokens.tolist()

    @functools.cached_property
    def sampled(self) -> dict[Path, list[int]]:
        """The target's own token after every prefix, for every seed."""
        return {p: self._topk(logits, len(p), 1)[0] for p, logits in self.target.items()}

    @functools.cached_property
    def fresh(self) -> dict[Path, list[int]]:
        """The same with other noise, for the wrong rules."""
        return {p: self._topk(logits, len(p), 1, salt=1)[0] for p, logits in self.target.items()}

    @functools.cached_property
    def guessed(self) -> dict[Path, list[list[int]]]:
        """The draft's mirror: its best tokens under the shared noise, for every seed."""
        return {p: self._topk(logits, len(p), 2) for p, logits in self.draft.items() if len(p) < LENGTH - 1}

    def chances(self) -> np.ndarray:
        """Probability of every output. [vocab ** LENGTH]."""
        every = itertools.product(range(self.vocab), repeat=LENGTH)
        return np.array([np.prod([self.target_probs[o[:i]][o[i]] for i in range(LENGTH)]) for o in every])


# -- trees


def random_trees(world: World) -> Trees:
    """Eight random trees a prefix, whatever the seed."""
    rng = np.random.default_rng(7)
    made = {
        p: [_cut(random_tree(rng, world.vocab, size), LENGTH - 1 - len(p)) for size in (0, 1, 2, 4, 6, 9, 14, 30)]
        for p in world.target
    }
    return lambda prefix, i: made[prefix][i % 8]


def _cut(tree: TokenTree, depth: int) -> TokenTree:
    return tree.take(np.flatnonzero(tree.depths <= depth))


def mirror_trees(world: World, widths: tuple[int, ...]) -> Trees:
    """Trees from the noise: `widths[d]` children at depth d, the draft's best for each seed."""

    def trees(prefix: Path, i: int) -> TokenTree:
        return build(tuple(level(prefix, i, 0)))

    def level(prefix: Path, i: int, depth: int) -> Iterator[tuple[int, tuple[object, ...]]]:
        if depth < len(widths) and len(prefix) < LENGTH - 1:
            for token in world.guessed[prefix][i][: widths[depth]]:
                yield token, tuple(level((*prefix, token), i, depth + 1))

    return trees


@functools.cache
def build(children: tuple[object, ...]) -> TokenTree:
    """The tree of nested (token, children)."""
    tree = TreeBuilder()

    def grow(parent: int, below: tuple[object, ...]) -> None:
        for token, more in below:  # type: ignore[misc]
            grow(tree.add(parent, token, -1.0), more)

    grow(ROOT, children)
    return tree.tree()


# -- rules


def lossless(world: World, walks: Walks) -> list[list[int]]:
    """The engine's own walk."""
    sampled = [world.sampled[path][i] for tree, prefix, i in walks for path in paths(tree, prefix)]
    return [verdict.tokens for verdict in walk(Forest.of([tree for tree, *_ in walks]), np.array(sampled, np.int64))]


def fresh_bonus(world: World, walks: Walks) -> list[list[int]]:
    """WRONG: where no child is hit the bonus is drawn anew, as if nothing had been rejected."""
    right = zip(lossless(world, walks), walks, strict=True)
    return [[*path, world.fresh[(*prefix, *path)][i]] for (*path, _), (_, prefix, i) in right]


def accept_by_ratio(world: World, walks: Walks) -> list[list[int]]:
    """WRONG: p / q acceptance of children that were not drawn from q."""
    return [_accepted_by_ratio(world, *each) for each in walks]


def _accepted_by_ratio(world: World, tree: TokenTree, prefix: Path, i: int) -> list[int]:
    node, path = ROOT, prefix
    while children := children_of(tree, node):
        ratios = world.target_probs[path] / np.maximum(world.draft_probs[path], 1e-12)
        child = next((c for c, token in children if world.uniform() < ratios[token]), None)
        if child is None:
            break
        node, path = child, (*path, int(tree.tokens[child]))
    return [*path[len(prefix) :], world.fresh[path][i]]


@functools.cache
def children_of(tree: TokenTree, node: int) -> list[tuple[int, int]]:
    """Index and token of each."""
    return [(c, int(tree.tokens[c])) for c in np.flatnonzero(tree.parents == node).tolist()]


@functools.cache
def paths(tree: TokenTree, prefix: Path) -> list[Path]:
    """Tokens from the start to each node, the root first."""
    return [(*prefix, *tree.path_tokens(node)) for node in (ROOT, *range(len(tree)))]


# -- the test


def outputs(world: World, trees: Trees, rule: Rule) -> list[int]:
    """Each seed's tokens, as one number in base `vocab`."""
    found: list[Path] = [()] * len(world.seeds)
    while unfinished := [i for i, prefix in enumerate(found) if len(prefix) < LENGTH]:
        walks = [(trees(found[i], i), found[i], i) for i in unfinished]
        for i, tokens in zip(unfinished, rule(world, walks), strict=True):
            found[i] = (*found[i], *tokens)[:LENGTH]
    return [functools.reduce(lambda number, token: number * world.vocab + token, prefix) for prefix in found]


def p_value(found: list[int], chances: np.ndarray) -> float:
    """Chi-square of outputs against chances; 0 if an impossible output occurred. Rare outputs share a cell."""
    observed, expected = np.bincount(found, minlength=len(chances)), chances * len(found)
    if observed[expected == 0].any():
        return 0.0
    likely = expected >= 5
    observed, expected = (np.append(x[likely], x[~likely].sum()) for x in (observed, expected))
    possible = expected > 0
    return float(stats.chisquare(observed[possible], expected[possible]).pvalue)


CASES = {
    4: SamplingParams(temperature=0.8),
    5: SamplingParams(temperature=1.2, min_p=0.05, top_k=4, top_p=0.9),
    6: SamplingParams(),
}


@pytest.fixture(scope="module")
def worlds() -> dict[int, World]:
    """By vocabulary; their samples are computed once."""
    assert load_kernels(), "these tests need a C++ compiler"
    return {vocab: World(vocab, params) for vocab, params in CASES.items()}


@pytest.mark.parametrize(("vocab", "widths"), [(4, None), (4, (2, 2)), (5, None), (5, (1, 1)), (6, (2, 1))], ids=str)
def test_outputs_follow_the_target(worlds: dict[int, World], vocab: int, widths: tuple[int, ...] | None) -> None:
    """Random trees (None), and trees that mirror the noise."""
    world = worlds[vocab]
    trees = random_trees(world) if widths is None else mirror_trees(world, widths)
    assert p_value(outputs(world, trees, lossless), world.chances()) > 0.001


@pytest.mark.parametrize("rule", [fresh_bonus, accept_by_ratio])
def test_wrong_rules_are_caught(worlds: dict[int, World], rule: Rule) -> None:
    assert p_value(outputs(worlds[4], random_trees(worlds[4]), rule), worlds[4].chances()) < 1e-6


def test_every_tree_gives_the_same_tokens() -> None:
    """Stronger than the distribution: seed by seed."""
    world = World(6, SamplingParams(temperature=0.9), SEEDS[:5_000])
    alone = outputs(world, mirror_trees(world, ()), lossless)
    assert outputs(world, random_trees(world), lossless) == alone
    assert outputs(world, mirror_trees(world, (2, 2)), lossless) == alone


def test_the_batched_tokens_are_those_of_sample() -> None:
    """The shortcut above, filters once a prefix instead of once a row, changes nothing."""
    for vocab, params in CASES.items():
        world = World(vocab, params, SEEDS[:300])
        for prefix in list(world.target)[:8]:
            rows = [RowSampling(params, int(seed), len(prefix)) for seed in world.seeds]
            assert sample(world.target[prefix].expand(300, -1), sampling_of(rows)) == world.sampled[prefix]


def test_mirrored_guesses_are_worth_making() -> None:
    """The trees above are hit often, so the walks were not all one step."""
    world = World(6, SamplingParams(), SEEDS[:5_000])
    hits = [y in guesses for y, guesses in zip(world.sampled[()], world.guessed[()], strict=True)]
    assert np.mean(hits) > 0.7
