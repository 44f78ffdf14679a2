"""Trees of several pools, or several drafters, for one request."""

import math
from unittest.mock import Mock, call

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support import follow, limits
from trees import check_tree

from pilotfish.core.drafting.drafter import CombinedDrafter, Drafter
from pilotfish.core.drafting.messages import Tree
from pilotfish.core.drafting.pools import DraftPool, RemoteSession, merged
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.tree import Forest, Guesses
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


REQUESTS = [Request(i, [1], SamplingParams(), 0, frozenset(), 10) for i in range(2)]


def drafter(*tokens: int, scores: list[float]) -> Mock:
    """One that proposes the same path for each request."""
    trees = [Guesses.chain(tokens, scores, "ngram") for _ in REQUESTS]
    return Mock(spec=Drafter, levels=1, propose=Mock(return_value=trees))


def test_the_best_nodes_of_all_trees() -> None:
    drafters = [drafter(5, 6, scores=[-1.0, -2.0]), drafter(5, 7, 8, scores=[-0.4, -0.8, -1.2])]
    for guesses in CombinedDrafter(drafters).propose(REQUESTS, limits(3)):
        tree = guesses.tree()
        assert sorted(tree.tokens) in ([5, 6, 7], [5, 7, 8])
        (first,) = follow(tree, [5])
        assert tree.scores[first] == -1.0  # the first drafter's


def test_everyone_is_told() -> None:
    drafters, trees = [Mock(spec=Drafter), Mock(spec=Drafter)], Forest.of([Guesses(), Guesses()])
    told = [
        *(call.expect(REQUESTS), call.verified(REQUESTS, trees), call.commit(REQUESTS[1], [3, 4])),
        *(call.gather(), call.flush(), call.pause(REQUESTS[0]), call.close(REQUESTS[1])),
    ]
    combined = CombinedDrafter(drafters)
    for name, arguments, _ in told:
        getattr(combined, name)(*arguments)
    assert [one.method_calls for one in drafters] == [told] * 2
