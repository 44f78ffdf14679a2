"""Trees of several pools for one request."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import check_tree

from pilotfish.core.drafting.messages import Tree
from pilotfish.core.drafting.pools import DraftPool, RemoteSession, merged
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.tree_copy import TreeCopy

Node = tuple[int, int, int, float]
REQUEST = Request(0, [1, 2, 3], SamplingParams(), 0, frozenset(), 100)


def session(name: str, nodes: list[Node]) -> RemoteSession:
    """Of (id, parent, token, score)."""
    own = RemoteSession(1, REQUEST, TreeCopy(3, 50, 1000), pool=DraftPool(name, name.encode()))
    if nodes:
        own.copy.attach(Tree(1, 1, 0, 3, *(list(column) for column in zip(*nodes, strict=True))))
    return own


@st.composite
def nodes(draw: st.DrawFn) -> list[Node]:
    count = draw(st.integers(0, 12))
    scores = st.floats(-4.0, 0.0)
    return [(n, draw(st.integers(0, n - 1)), draw(st.integers(0, 3)), draw(scores)) for n in range(1, count + 1)]


@given(nodes(), nodes(), st.integers(1, 20))
def test_it_has_the_best_of_all_trees(first: list[Node], second: list[Node], count: int) -> None:
    sessions = [session("a", first), session("b", second)]
    tree = merged(sessions, count).tree()
    check_tree(tree)
    chances: dict[tuple[int, ...], dict[str, float]] = {}
    for own in sessions:
        assert own.pool is not None
        guesses = own.copy.best(1000, "").tree()
        calibrated = own.pool.score.calibrated(guesses.scores.tolist()) if len(guesses) else []
        for node, score in enumerate(calibrated):
            cut = min([score, *(calibrated[above] for above in guesses.path(node))])
            chances.setdefault(tuple(guesses.path_tokens(node)), {})[own.pool.name] = cut
    assert len(tree) == min(count, len(chances))
    for node in range(len(tree)):
        by_pool = chances[tuple(tree.path_tokens(node))]
        assert tree.scores[node] == max(by_pool.values()) == by_pool[tree.origins[node]]
    kept = {tuple(tree.path_tokens(node)) for node in range(len(tree))}
    others = [max(by_pool.values()) for path, by_pool in chances.items() if path not in kept]
    assert not others or max(others) <= min(tree.scores)


def test_a_pool_that_is_seldom_right_gives_way() -> None:
    """Both believe the same of their nodes; one of them was nearly always wrong."""
    liar, honest = session("liar", [(1, 0, 7, -0.1)]), session("honest", [(1, 0, 8, -0.2)])
    assert merged([liar, honest], 1).origins == ["liar"]
    for _ in range(200):
        assert liar.pool is not None and honest.pool is not None
        liar.pool.score.observe([-0.1], [])
        honest.pool.score.observe([-0.2], [-0.2])
        for own in (liar, honest):
            assert own.pool is not None
            own.pool.score.end_step()
    guesses = merged([liar, honest], 2)
    assert guesses.origins == ["honest", "liar"] or guesses.tree().origins[np.argmax(guesses.scores)] == "honest"
    assert math.exp(max(guesses.scores)) > 0.9 and math.exp(min(guesses.scores)) < 0.2
    assert merged([liar, honest], 1).origins == ["honest"]


def test_sessions_without_a_pool_give_nothing() -> None:
    waiting = RemoteSession(2, REQUEST, TreeCopy(3, 50, 1000))
    assert merged([session("a", [(1, 0, 7, -0.1)]), waiting], 5).tokens == [7]
    assert len(merged([waiting], 5)) == 0


@pytest.mark.parametrize("seen", [0, 3])
def test_scores_are_believed_until_something_was_seen(seen: int) -> None:
    pool = DraftPool("a", b"a")
    for _ in range(seen):
        pool.score.observe([-0.5], [])
    before = pool.score.calibrated([-0.5])
    pool.score.end_step()
    (after,) = pool.score.calibrated([-0.5])
    assert before == [pytest.approx(-0.55)]  # the middle of its bin
    assert (after < before[0]) == bool(seen)
