"""Several pools guess for each sequence at once: outputs stay, and each pool gets its due."""

from pathlib import Path

import pytest
from live_drafts import drafted
from side import NODES, Side, load, make_request, tree
from support import drain, limits, make_engine
from test_lossless import MIXED, alone, generate, params

from pilotfish.config.engine import EngineConfig
from pilotfish.core.drafting.messages import FEEDBACK, Close, Commit, Open, TreeFeedback
from pilotfish.core.trees.tree import Forest
from pilotfish.errors import ParameterError

# -- by a pool that a test plays


def test_each_pool_gets_the_sequence_and_the_best_of_both_is_verified() -> None:
    side, request = Side(pools=2, pools_each=2), make_request()
    assert not len(side.propose(request)[0])
    first, second = side.said(Open, b"0")[0], side.said(Open, b"1")[0]
    assert first.session != second.session and first.tokens == second.tokens == request.tokens
    side.hear(tree(first, 0, 5, *NODES))
    side.hear(tree(second, 0, 5, (1, 0, 7, -0.1), (2, 1, 11, -0.2)), b"1")
    (found,) = side.propose(request)
    paths = {tuple(found.path_tokens(node)): found.origins[node] for node in range(len(found))}
    assert paths == {(7,): "pool 1", (7, 9): "pool 0", (7, 11): "pool 1", (8,): "pool 0"}


def test_each_is_told_and_counted_by_its_own_nodes() -> None:
    side, request = Side(pools=2, pools_each=2), make_request()
    for pool in side.pools:
        side.hear(load(capabilities=[FEEDBACK]), pool.peer)
    side.propose(request)
    first, second = side.said(Open, b"0")[0], side.said(Open, b"1")[0]
    side.hear(tree(first, 0, 5, *NODES))
    side.hear(tree(second, 0, 5, (5, 0, 7, -0.1), (6, 5, 11, -0.2)), b"1")
    guesses = side.drafter.propose([request], limits(nodes=8, levels=3))
    side.drafter.verified([request], Forest.of(guesses))
    side.commit(request, 7, 11, 3)
    assert [(set(m.verified), m.accepted) for m in side.said(TreeFeedback, b"0")] == [({1, 2, 3}, [1])]
    assert [(set(m.verified), m.accepted) for m in side.said(TreeFeedback, b"1")] == [({5, 6}, [5, 6])]
    assert [(pool.score.verified, pool.score.accepted) for pool in side.pools] == [(3, 1), (2, 2)]
    assert len(side.said(Commit, b"0")) == len(side.said(Commit, b"1")) == 1


def test_a_pool_that_is_lost_costs_its_guesses_alone() -> None:
    side, request = Side(pools=2, pools_each=2), make_request()
    side.propose(request)
    first, second = side.said(Open, b"0")[0], side.said(Open, b"1")[0]
    side.hear(tree(first, 0, 5, *NODES))
    side.hear(tree(second, 0, 5, (1, 0, 12, -0.1)), b"1")
    side.problems[b"1"] = "pool 1 hung up"
    side.drafter.tick()
    (found,) = side.propose(request)
    assert sorted(found.tokens) == [7, 8, 9] and not side.said(Close, b"0") and not side.said(Open, b"0")
    side.problems.clear()
    side.hear(load(), b"1")
    side.propose(request)
    assert side.said(Open, b"1")[0].generation == 2


def test_more_than_there_are_is_refused(llama: Path) -> None:
    own = {"target": llama, "mode": "async", "drafter": "lm"}
    EngineConfig(**own, draft_pool=("ipc://a", "ipc://b"), draft_pools_each=2)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match=r"draft_pools_each: 2 is not allowed; expected at most 1"):
        EngineConfig(**own, draft_pool=("ipc://a",), draft_pools_each=2)  # type: ignore[arg-type]


# -- by real workers


def test_outputs_stay_and_both_pools_help(llama: Path, draft: Path) -> None:
    """One draft is the target itself; the other knows less."""
    with drafted(llama, [draft, llama], pace="target=12ms") as d:
        assert generate(d.engine, MIXED, together=True) == [alone(llama)[case] for case in MIXED]
    d.settle()
    scores = [pool.score for pool in d.drafter.machine.pools]
    assert all(score.verified > 5 for score in scores) and scores[1].accepted > 5, scores


def test_outputs_stay_where_pools_are_short_of_room_and_requests_of_slots(llama: Path, draft: Path) -> None:
    """Pools pause sessions, and the target pauses requests."""
    with drafted(llama, [draft, llama], 150, kv_slots=150) as d:
        d.engine.worker.scheduler.headroom = 1
        samples = [d.engine.submit(f"x = {case}", params(case))[0] for case in MIXED]
        reference = make_engine(llama)
        expected = [reference.submit(f"x = {case}", params(case))[0] for case in MIXED]
        drain(d.engine)
        drain(reference)
        assert sum(sample.request.stats.preemptions for sample in samples) > 1
        assert [sample.token_ids for sample in samples] == [sample.token_ids for sample in expected]
    d.settle()
