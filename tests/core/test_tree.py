"""Trees: their order makes every cut connected, and a walk over any tree gives what no tree gives."""

from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support import paths_of, random_guesses
from trees import check_tree, trees_of

from pilotfish.core.trees.tree import EMPTY_TREE, NO_TOKEN, ROOT, Forest, Guesses, TokenTree, best, walk

VOCAB = 4
Target = Callable[[Sequence[int]], int]


@st.composite
def guesses(draw: st.DrawFn, max_nodes: int = 24) -> Guesses:
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    return random_guesses(rng, VOCAB, draw(st.integers(0, max_nodes)))


def trees() -> st.SearchStrategy[TokenTree]:
    return guesses().map(Guesses.tree)


def target(seed: int) -> Target:
    """A model: the token after a path, any function of it."""
    return lambda path: hash((seed, *path)) % VOCAB


@given(tree=trees())
def test_parents_come_first_scores_never_rise_and_siblings_differ(tree: TokenTree) -> None:
    check_tree(tree)
    assert tree.depths.tolist() == [len(tree.path(node)) for node in range(len(tree))]


def test_origins_follow_their_nodes() -> None:
    tree, other = Guesses(), Guesses()
    first = tree.add(ROOT, 3, -1.0, "lm")
    tree.add(first, 4, -1.5, "lm")
    tree.add(ROOT, 5, -0.5, "pool 0")
    again = other.add(ROOT, 3, -0.1, "ngram")
    other.add(again, 9, -0.2, "ngram")
    tree.merge(other)
    merged = tree.tree()
    named = {tuple(merged.path_tokens(node)): merged.origins[node] for node in range(len(merged))}
    assert named == {(3,): "lm", (3, 4): "lm", (5,): "pool 0", (3, 9): "ngram"}  # the first to guess it holds it
    for nodes in (best(merged.scores, 2), np.array([0, 2, 3])):
        cut = merged.take(nodes)
        assert {tuple(cut.path_tokens(node)): cut.origins[node] for node in range(len(cut))}.items() <= named.items()
        assert len(cut.origins) == len(cut.tokens) == len(nodes)


@given(tokens=st.lists(st.integers(0, VOCAB - 1), max_size=5))
def test_a_chain_is_one_path(tokens: list[int]) -> None:
    scores = [-0.5 * (place + 1) for place in range(len(tokens))]
    tree, built, node = Guesses.chain(tokens, scores, "ngram").tree(), Guesses(), ROOT
    for token, score in zip(tokens, scores, strict=True):
        node = built.add(node, token, score, "ngram")
    for name, values in vars(tree).items():
        assert values.tolist() == getattr(built.tree(), name).tolist(), name
        assert values.dtype == getattr(EMPTY_TREE, name).dtype, name


@given(tree=trees(), count=st.integers(0, 30))
def test_the_best_nodes_form_a_connected_tree(tree: TokenTree, count: int) -> None:
    chosen = tree.take(best(tree.scores, count))
    assert len(chosen) == min(count, len(tree))
    every = paths_of(tree)
    assert paths_of(chosen).items() <= every.items()
    worst = min(chosen.scores, default=0.0)
    assert all(score <= worst for path, score in every.items() if path not in paths_of(chosen))


@given(grown=guesses(), count=st.integers(0, 30))
def test_the_best_of_lists_are_the_best_of_arrays(grown: Guesses, count: int) -> None:
    tree = grown.tree()
    expected = tree.take(best(tree.scores, count))
    for name, values in vars(grown.best(count).tree()).items():
        assert values.tolist() == getattr(expected, name).tolist(), name


@given(one=guesses(), other=guesses())
def test_merge_holds_both_and_keeps_its_own_scores(one: Guesses, other: Guesses) -> None:
    before, added = paths_of(one.tree()), paths_of(other.tree())
    one.merge(other)
    merged = paths_of(one.tree())
    assert merged.keys() == before.keys() | added.keys()
    assert before.items() <= merged.items()


@given(tree=trees())
def test_paths_as_rows(tree: TokenTree) -> None:
    values = np.arange(100, 100 + len(tree), dtype=np.int32)
    for node, row in enumerate(tree.along_paths(values).tolist()):
        assert row == [*values[tree.path(node)], *[0] * (len(row) - tree.depths[node])]


@given(proposed=st.lists(guesses(), max_size=5), seed=st.integers(0, 1 << 20))
def test_a_walk_gives_what_the_target_alone_gives(proposed: list[Guesses], seed: int) -> None:
    """Of trees side by side, each with a target of its own."""
    forest = [each.tree() for each in proposed]
    models = [target(seed + index) for index in range(len(forest))]
    sampled = [
        model(tree.path_tokens(node))
        for model, tree in zip(models, forest, strict=True)
        for node in (ROOT, *range(len(tree)))
    ]
    together = Forest.of(proposed)
    verdicts = walk(together, np.array(sampled, np.int64))
    for tree, model, verdict in zip(forest, models, verdicts, strict=True):
        alone: list[int] = []
        for _ in verdict.tokens:
            alone.append(model(alone))
        assert verdict.tokens == alone
        assert together.nodes.tokens[verdict.path].tolist() == alone[:-1]
        assert tuple(alone[:-1]) in paths_of(tree) or len(alone) == 1
        assert tuple(alone) not in paths_of(tree)  # it stops only where the tree does
        assert [sampled[place] for place in verdict.samples] == alone
        assert (verdict.nodes, verdict.deepest) == (len(tree), tree.depths.max(initial=0))


@given(proposed=st.lists(guesses(), max_size=5), data=st.data())
def test_trees_side_by_side_stay_what_they_are(proposed: list[Guesses], data: st.DataObject) -> None:
    together, forest = Forest.of(proposed), [each.tree() for each in proposed]
    assert [paths_of(tree) for tree in trees_of(together)] == [paths_of(tree) for tree in forest]
    count = data.draw(st.integers(0, 40))
    cut = together.take(best(together.nodes.scores, count))
    assert len(cut) == min(count, len(together)) and cut.num_trees == len(forest)
    for part, tree in zip(trees_of(cut), forest, strict=True):
        assert paths_of(part).items() <= paths_of(tree).items()


def test_a_walk_ends_before_a_node_that_cannot_be_sampled() -> None:
    tree = Guesses()
    second = tree.add(tree.add(ROOT, 1, -0.1), 2, -0.2)
    tree.add(second, 3, -0.3)
    forest = Forest.of([tree])
    (verdict,) = walk(forest, np.array([1, 2, NO_TOKEN, 5]))
    assert (verdict.path, verdict.tokens) == ([0, 1], [1, 2])  # the next step finds nothing to sample at its root
    (verdict,) = walk(forest, np.array([NO_TOKEN, 2, 3, 5]))
    assert (verdict.path, verdict.tokens) == ([], [])
