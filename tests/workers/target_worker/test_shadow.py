"""What a would-be step commits, which requests are followed, and how that is counted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import random_guesses

from pilotfish.core.cache.slots import NO_SLOTS
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.calibration import RecentRate
from pilotfish.core.scheduling.request import Request
from pilotfish.core.scheduling.step import Chunk, RequestCommit, Step
from pilotfish.core.trees.tree import Forest, walk
from pilotfish.workers.target_shadow import DEPTHS, ShadowScore, in_share, known_tokens

IDS = st.integers(0, 2**62)


@given(IDS, st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_has_the_requests_of_a_smaller_one(request: int, one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert in_share(request, large) or not in_share(request, small)
    assert in_share(request, 1.0) and not in_share(request, 0.0)


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_a_share_is_about_as_large_as_it_says(share: float) -> None:
    assert sum(in_share(number, share) for number in range(4000)) / 4000 == pytest.approx(share, abs=0.02)


def make_request(number: int, tokens: list[int], prompt: int) -> Request:
    return Request(number, tokens[:prompt], SamplingParams(max_tokens=1000), 0, frozenset(), 1000)


@given(st.integers(0, 2**32 - 1))
def test_any_tree_commits_what_is_known(seed: int) -> None:
    """As far as it agrees, and one token more; never beyond the end."""
    rng = np.random.default_rng(seed)
    known = {number: rng.integers(0, 3, int(rng.integers(4, 12))).tolist() for number in range(3)}
    requests = [make_request(number, tokens, int(rng.integers(1, len(tokens)))) for number, tokens in known.items()]
    forest = Forest.of([random_guesses(rng, 3, int(rng.integers(0, 20))) for _ in requests])
    chunks = [Chunk(request, 1) for request in requests]
    step = Step(chunks, [True] * 3, [range(0)] * 3, [NO_SLOTS] * 3, forest, NO_SLOTS)
    for request, verdict in zip(requests, walk(forest, known_tokens(step, known)), strict=True):
        base, tokens = len(request.tokens), known[request.id]
        assert verdict.tokens == tokens[base : base + len(verdict.tokens)]
        assert len(verdict.path) < len(verdict.tokens) or base + len(verdict.tokens) == len(tokens)


def test_a_rate_follows_what_is_recent() -> None:
    rate = RecentRate()
    assert rate.value == 0.0
    rate.add(3, 1.5)
    assert rate.value == 2.0
    for _ in range(10_000):
        rate.add(10, 1.0)
    assert rate.value == pytest.approx(10.0, rel=0.01)


def commit(tokens: int, nodes: int, depth: int, accepted: int) -> RequestCommit:
    request = make_request(0, [1], 1)
    return RequestCommit(request, [1] * tokens, origins=["pool"] * accepted, nodes=nodes, depth=depth)


def test_depths_are_counted_as_far_as_they_are_told_apart() -> None:
    score = ShadowScore()
    score.add([commit(3, nodes=8, depth=4, accepted=2), commit(1, nodes=0, depth=0, accepted=0)], hits=1)
    score.add([commit(11, nodes=20, depth=DEPTHS + 3, accepted=10)], hits=0)
    assert (score.steps, score.trees, score.tokens, score.accepted, score.hits) == (3, 2, 15, 12, 1)
    assert score.tried_by_depth == [2, 2, 2, 1, 1, 1, 1, 1]
    assert score.accepted_by_depth == [2, 2, 1, 1, 1, 1, 1, 1]
    assert score.tokens_per_step == 5.0
