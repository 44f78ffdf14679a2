"""Speculation draws from the target's distribution, exactly: 200,000 seeds, and a wrong rule is caught."""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sizes import sized
from support import RowSampling, columns_of, guesses_of, random_tree, reference_probs, sampling_of

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.trees.tree import ROOT, Forest, Guesses, TokenTree, walk
from pilotfish.model.cpu.native import load_kernels
from pilotfish.model.sampling import filtered, sample

NUM_SEEDS = sized(20_000, 200_000)
LENGTH = 3
Path = tuple[int, ...]
Places = np.ndarray  # int64 [n], of seeds that are alike so far
#: The trees below `prefix`, each with the seeds that have it.
Trees = Callable[[Path, Places], list[tuple[TokenTree, Places]]]
Walks = list[tuple[TokenTree, Path, Places]]  # a tree, the tokens before it, the seeds
#: Tokens from the start after a step, each with the seeds that have committed them.
Rule = Callable[["World", Walks], list[tuple[Path, Places]]]

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

    def _topk(self, logits: torch.Tensor, position: int, k: int, salt: int = 0) -> np.ndarray:
        """perturbed_topk for every seed, less the cost of 200,000 objects a call. [seeds, k]."""
        scores = filtered(logits, columns_of([RowSampling(self.params, 0, 0)])).expand(len(self.seeds), -1)
        seeds = torch.from_numpy((self.seeds ^ np.uint64(salt)).view(np.int64))
        _, tokens = torch.ops.pilotfish.perturbed_topk(scores, seeds, torch.full_like(seeds, position), k)
        return np.asarray(tokens.numpy())

    @functools.cached_property
    def sampled(self) -> dict[Path, np.ndarray]:
        """The target's own token after every prefix, for every seed. [seeds] each."""
        return {p: self._topk(logits, len(p), 1)[:, 0] for p, logits in self.target.items()}

    @functools.cached_property
    def fresh(self) -> dict[Path, np.ndarray]:
        """The same with other noise, for the wrong rule."""
        return {p: self._topk(logits, len(p), 1, salt=1)[:, 0] for p, logits in self.target.items()}

    @functools.cached_property
    def guessed(self) -> dict[Path, np.ndarray]:
        """The draft's mirror: its best tokens under the shared noise, for every seed. [seeds, 2] each."""
        return {p: self._topk(logits, len(p), 2) for p, logits in self.draft.items() if len(p) < LENGTH - 1}

    def chances(self) -> np.ndarray:
        """Probability of every output. [vocab ** LENGTH]."""
        every = itertools.product(range(self.vocab), repeat=LENGTH)
        return np.array([np.prod([self.target_probs[o[:i]][o[i]] for i in range(LENGTH)]) for o in every])


def alike(rows: np.ndarray, seeds: Places) -> Iterator[tuple[Path, Places]]:
    """Each row of tokens that occurs, with the seeds that have it. `rows` is [seeds, columns]."""
    keys = np.ascontiguousarray(rows, np.uint8).view((np.void, rows.shape[1]))[:, 0]
    _, first, which, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    parts = np.split(seeds[np.argsort(which, kind="stable")], np.cumsum(counts))[:-1]
    return zip(map(tuple, rows[first].tolist()), parts, strict=True)


# -- trees


def random_trees(world: World) -> Trees:
    """Eight random trees a prefix, whatever the seed."""
    rng = np.random.default_rng(7)
    made = {
        p: [_cut(random_tree(rng, world.vocab, size), LENGTH - 1 - len(p)) for size in (0, 1, 2, 4, 6, 9, 14, 30)]
        for p in world.target
    }
    return lambda prefix, seeds: [(tree, seeds[seeds % 8 == i]) for i, tree in enumerate(made[prefix])]


def _cut(tree: TokenTree, depth: int) -> TokenTree:
    return tree.take(np.flatnonzero(tree.depths <= depth))


def mirror_trees(world: World, widths: tuple[int, ...]) -> Trees:
    """Trees from the noise: `widths[d]` children at depth d, the draft's best for each seed."""

    def trees(prefix: Path, seeds: Places) -> list[tuple[TokenTree, Places]]:
        return [(build(levels), part) for levels, part in grown(prefix, (((),),), seeds)]

    def grown(prefix: Path, levels: tuple[tuple[Path, ...], ...], seeds: Places) -> Iterator[tuple[Any, Places]]:
        depth, leaves = len(levels) - 1, levels[-1]
        if depth == len(widths) or len(prefix) + depth == LENGTH - 1:
            yield levels, seeds
            return
        guesses = [world.guessed[(*prefix, *leaf)][seeds, : widths[depth]] for leaf in leaves]
        for row, part in alike(np.hstack(guesses), seeds):
            below = tuple((*leaves[i // widths[depth]], token) for i, token in enumerate(row))
            yield from grown(prefix, (*levels, below), part)

    return trees


@functools.cache
def build(levels: tuple[tuple[Path, ...], ...]) -> TokenTree:
    tree, nodes = Guesses(), {(): ROOT}
    for path in itertools.chain.from_iterable(levels[1:]):
        nodes[path] = tree.add(nodes[path[:-1]], path[-1], -1.0)
    return tree.tree()


# -- rules


def lossless(world: World, walks: Walks) -> list[tuple[Path, Places]]:
    """The engine's own walk; once for all seeds that have the same tree and draw the same tokens at its nodes."""
    drawn = [(tree, prefix, *each) for tree, prefix, seeds in walks for each in draws(world, tree, prefix, seeds)]
    sampled = [token for _, _, tokens, _ in drawn for token in tokens]
    verdicts = walk(Forest.of([guesses_of(tree) for tree, *_ in drawn]), np.array(sampled, np.int64))
    return [((*prefix, *v.tokens), seeds) for v, (_, prefix, _, seeds) in zip(verdicts, drawn, strict=True)]


def draws(world: World, tree: TokenTree, prefix: Path, seeds: Places) -> Iterator[tuple[Path, Places]]:
    return alike(np.stack([world.sampled[path][seeds] for path in paths(tree, prefix)], axis=1), seeds)


def fresh_bonus(world: World, walks: Walks) -> list[tuple[Path, Places]]:
    """WRONG: where no child is hit the bonus is drawn anew, as if nothing had been rejected."""
    return [each for (*path, _), seeds in lossless(world, walks) for each in drawn_anew(world, tuple(path), seeds)]


def drawn_anew(world: World, path: Path, seeds: Places) -> list[tuple[Path, Places]]:
    return [((*path, *token), part) for token, part in alike(world.fresh[path][seeds, None], seeds)]


@functools.cache
def paths(tree: TokenTree, prefix: Path) -> list[Path]:
    """Tokens from the start to each node, the root first."""
    return [(*prefix, *tree.path_tokens(node)) for node in (ROOT, *range(len(tree)))]


# -- the test


def outputs(world: World, trees: Trees, rule: Rule) -> np.ndarray:
    """Each seed's tokens, as one number in base `vocab`. [seeds]."""
    found = np.zeros(len(world.seeds), np.int64)
    unfinished: dict[Path, Places] = {(): np.arange(len(found))}
    while unfinished:
        walks = [(tree, p, part) for p, seeds in unfinished.items() for tree, part in trees(p, seeds) if len(part)]
        after: defaultdict[Path, list[Places]] = defaultdict(list)
        for path, seeds in rule(world, walks):
            after[path[:LENGTH]].append(seeds)
        merged = {path: np.concatenate(parts) for path, parts in after.items()}
        for path in [path for path in merged if len(path) == LENGTH]:
            found[merged.pop(path)] = functools.reduce(lambda number, token: number * world.vocab + token, path)
        unfinished = merged
    return found


def p_value(found: np.ndarray, chances: np.ndarray) -> float:
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
    assert load_kernels(), "these tests need a C++ compiler"
    return {vocab: World(vocab, params) for vocab, params in CASES.items()}


@pytest.mark.parametrize(("vocab", "widths"), [(4, None), (4, (2, 2)), (5, None), (5, (1, 1)), (6, (2, 1))], ids=str)
def test_outputs_follow_the_target(worlds: dict[int, World], vocab: int, widths: tuple[int, ...] | None) -> None:
    world = worlds[vocab]
    trees = random_trees(world) if widths is None else mirror_trees(world, widths)
    assert p_value(outputs(world, trees, lossless), world.chances()) > 0.001


def test_a_wrong_rule_is_caught(worlds: dict[int, World]) -> None:
    assert p_value(outputs(worlds[4], random_trees(worlds[4]), fresh_bonus), worlds[4].chances()) < 1e-6


def test_every_tree_gives_the_same_tokens() -> None:
    world = World(6, SamplingParams(temperature=0.9), SEEDS[:5_000])
    alone = outputs(world, mirror_trees(world, ()), lossless)
    assert (outputs(world, random_trees(world), lossless) == alone).all()
    assert (outputs(world, mirror_trees(world, (2, 2)), lossless) == alone).all()


def test_the_batched_tokens_are_those_of_sample() -> None:
    """The shortcut above, filters once a prefix instead of once a row, changes nothing."""
    for vocab, params in CASES.items():
        world = World(vocab, params, SEEDS[:300])
        for prefix in list(world.target)[:8]:
            rows = [RowSampling(params, int(seed), len(prefix)) for seed in world.seeds]
            assert sample(world.target[prefix].expand(300, -1), sampling_of(rows)) == world.sampled[prefix].tolist()
