"""Trees: their order makes every cut connected, and a walk over any tree gives what no tree gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import random_tree

from pilotfish.core.tree import ROOT, TokenTree, walk

VOCAB = 4
Target = Callable[[Sequence[int]], int]


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 24) -> TokenTree:
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    return random_tree(rng, VOCAB, draw(st.integers(0, max_nodes)))


def paths(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """Score of every path, by its tokens."""
    return {tuple(tree.tokens[n] for n in tree.path(node)): tree.scores[node] for node in tree.nodes()}


def target(seed: int) -> Target:
    """A model: the token after a path, any function of it."""
    return lambda path: hash((seed, *path)) % VOCAB


@given(tree=trees())
def test_parents_come_first_and_scores_never_rise(tree: TokenTree) -> None:
    assert len(tree) == len(list(tree.nodes()))
    for node in tree.nodes():
        parent = tree.parents[node]
        assert parent < node
        assert tree.scores[node] <= tree.scores[parent]
        assert tree.depths[node] == tree.depths[parent] + 1 == len(tree.path(node))
        assert tree.child(parent, tree.tokens[node]) == node
        assert node in tree.children(parent)


@given(tree=trees())
def test_siblings_carry_different_tokens(tree: TokenTree) -> None:
    for node in (ROOT, *tree.nodes()):
        tokens = [tree.tokens[child] for child in tree.children(node)]
        assert len(set(tokens)) == len(tokens)


def test_origins_follow_their_nodes() -> None:
    tree, other = TokenTree(), TokenTree()
    first = tree.add(ROOT, 3, -1.0, "lm")
    tree.add(first, 4, -1.5, "lm")
    tree.add(ROOT, 5, -0.5, "pool 0")
    again = other.add(ROOT, 3, -0.1, "ngram")
    other.add(again, 9, -0.2, "ngram")
    tree.merge(other)
    named = {tuple(tree.path_tokens(node)): tree.origins[node] for node in tree.nodes()}
    assert named == {(3,): "lm", (3, 4): "lm", (5,): "pool 0", (3, 9): "ngram"}  # the first to guess it holds it
    for cut in (tree.best(2), tree.subtree([1, 3, 4])):
        assert {tuple(cut.path_tokens(node)): cut.origins[node] for node in cut.nodes()}.items() <= named.items()
        assert len(cut.origins) == len(cut.tokens)


def test_a_child_added_twice_is_one_child_with_its_first_score() -> None:
    tree = TokenTree()
    first = tree.add(ROOT, 3, -1.0)
    assert tree.add(ROOT, 3, -0.1) == first
    assert tree.scores[first] == -1.0
    assert len(tree) == 1


@given(tree=trees(), count=st.integers(0, 30))
def test_the_best_nodes_form_a_connected_tree(tree: TokenTree, count: int) -> None:
    best = tree.best(count)
    assert len(best) == min(count, len(tree))
    every = paths(tree)
    assert paths(best).items() <= every.items()  # subtree() would have failed on a missing parent
    worst = min(best.scores)
    assert all(score <= worst for path, score in every.items() if path not in paths(best))


@given(tree=trees(), depth=st.integers(0, 4))
def test_a_subtree_keeps_paths_and_scores(tree: TokenTree, depth: int) -> None:
    cut = tree.subtree([node for node in tree.nodes() if tree.depths[node] <= depth])
    assert paths(cut) == {path: score for path, score in paths(tree).items() if len(path) <= depth}


@given(tree=trees(), tokens=st.lists(st.integers(0, VOCAB - 1), max_size=6))
def test_follow_goes_as_far_as_the_tree(tree: TokenTree, tokens: list[int]) -> None:
    nodes = tree.follow(tokens)
    assert [tree.tokens[node] for node in nodes] == tokens[: len(nodes)]
    assert not nodes or tree.path(nodes[-1]) == nodes
    if len(nodes) < len(tokens):
        assert tree.child(nodes[-1] if nodes else ROOT, tokens[len(nodes)]) is None


@given(one=trees(), other=trees())
def test_merge_holds_both_and_keeps_its_own_scores(one: TokenTree, other: TokenTree) -> None:
    before, added = paths(one), paths(other)
    one.merge(other)
    merged = paths(one)
    assert merged.keys() == before.keys() | added.keys()
    assert before.items() <= merged.items()
    assert all(one.scores[node] <= one.scores[one.parents[node]] for node in one.nodes())


@given(tree=trees(), seed=st.integers(0, 1 << 20))
def test_a_walk_gives_what_the_target_alone_gives(tree: TokenTree, seed: int) -> None:
    model = target(seed)
    sampled = [model([tree.tokens[n] for n in tree.path(node)]) for node in (ROOT, *tree.nodes())]
    tokens = walk(tree, sampled)
    alone: list[int] = []
    for _ in tokens:
        alone.append(model(alone))
    assert tokens == alone
    assert tuple(tokens[:-1]) in paths(tree) or len(tokens) == 1
    assert tuple(tokens) not in paths(tree)  # it stops only where the tree does


@pytest.mark.parametrize("count", [0, 1])
def test_an_empty_tree_gives_the_bonus_token(count: int) -> None:
    assert walk(TokenTree().best(count), [7]) == [7]


def test_a_walk_ends_before_a_node_that_cannot_be_sampled() -> None:
    tree = TokenTree()
    first = tree.add(ROOT, 1, -0.1)
    second = tree.add(first, 2, -0.2)
    assert walk(tree, [1, 2, 3]) == [1, 2, 3]
    assert walk(tree, [1, 2, None]) == [1, 2]
    assert walk(tree, [1, None, 3]) == [1]
    assert walk(tree, [None, 2, 3]) == []
    assert walk(tree, [0, None, None]) == [0]
    assert second == 2
