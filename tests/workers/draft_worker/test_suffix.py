"""Suffix decoding: trees of what followed, in the sequence itself and in its tenant's past responses."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import children_of, follow, limits, proposed

from pilotfish.core.drafting.drafter import Drafter
from pilotfish.core.sampling.noise import gumbel
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import FinishReason, Request
from pilotfish.core.trees.tree import ROOT, TokenTree
from pilotfish.workers import suffix
from pilotfish.workers.automaton import Context, SuffixAutomaton
from pilotfish.workers.ngram import NgramDrafter, NgramIndex
from pilotfish.workers.suffix import PRIOR, ResponseCache, SuffixDrafter, next_token_chances, perturbed

TOKENS = st.lists(st.integers(0, 5), min_size=1, max_size=40)


def request(tokens: list[int], salt: str | None = None, temperature: float = 0.0, number: int = 0) -> Request:
    params = SamplingParams(temperature=temperature)
    return Request(number, tokens, params, 3, frozenset(), 100, cache_salt=salt)


LIMITS = limits(8)


def make_drafter() -> SuffixDrafter:
    return SuffixDrafter(ResponseCache(1000))


def finish(drafter: Drafter, r: Request, output: list[int], reason: FinishReason = FinishReason.STOP) -> None:
    r.tokens += output
    r.finish_reason = reason
    drafter.close(r)


def seen(tree: TokenTree) -> list[Any]:
    return [tree.tokens.tolist(), tree.parents.tolist(), tree.scores.tolist()]


# -- chances


def test_chances_are_counts_smoothed_by_shorter_contexts() -> None:
    chances = next_token_chances([Context(2, {5: 3}), Context(1, {5: 3, 6: 1})])
    short, long = PRIOR, PRIOR / 2
    assert chances[6] == pytest.approx(long / (3 + long) * 1 / (4 + short))
    assert chances[5] == pytest.approx((3 + long * 3 / (4 + short)) / (3 + long))
    assert next_token_chances([]) == {}


@given(
    contexts=st.lists(
        st.builds(Context, st.integers(1, 40), st.dictionaries(st.integers(0, 9), st.integers(1, 64), min_size=1)),
        max_size=6,
    )
)
def test_chances_leave_something_for_the_unknown(contexts: list[Context]) -> None:
    chances = next_token_chances(contexts)
    assert chances.keys() == {token for context in contexts for token in context.followers}
    assert all(chance > 0 for chance in chances.values())
    totals = [(context.length, sum(context.followers.values())) for context in contexts]
    left = math.prod(1 - total / (total + PRIOR / length) for length, total in totals)
    assert left > 0
    assert 1 - sum(chances.values()) == pytest.approx(left, rel=1e-9, abs=1e-14)


def test_noise_moves_chances_to_what_it_favours() -> None:
    r, chances = request([1], temperature=0.7), {4: 0.3, 9: 0.3, 2: 0.2}
    noise = gumbel(r.seed, 17, 10)
    found = perturbed(chances, r, 17)
    assert sum(found.values()) < 1
    for a in chances:
        for b in chances:
            expected = math.log(chances[a] / chances[b]) + noise[a] - noise[b]
            assert math.log(found[a] / found[b]) == pytest.approx(expected)
    assert sum(perturbed({4: 0.5, 9: 0.5}, r, 17).values()) == pytest.approx(1)  # no other token can come


def test_chances_under_the_noise_are_right_on_average() -> None:
    """The noise picks token 4 in 0.6 of all positions; the mean chance is near that, and says where."""
    r, chances = request([1], temperature=1.0), {4: 0.6}
    shares = [0.6 if token == 4 else 0.1 for token in range(5)]
    won, given_chances = [], []
    for position in range(2000):
        scores = [math.log(share) + g for share, g in zip(shares, gumbel(r.seed, position, 5), strict=True)]
        won.append(scores.index(max(scores)) == 4)
        given_chances.append(perturbed(chances, r, position)[4])
    assert sum(given_chances) / 2000 == pytest.approx(0.6, abs=0.06)
    where_won = [chance for chance, yes in zip(given_chances, won, strict=True) if yes]
    where_lost = [chance for chance, yes in zip(given_chances, won, strict=True) if not yes]
    assert sum(where_won) / len(where_won) > 0.2 + sum(where_lost) / len(where_lost)


# -- trees of one sequence


def test_what_followed_becomes_a_tree() -> None:
    (tree,) = proposed(make_drafter(), [request([1, 2, 3, 4, 0, 1, 2, 5, 6, 0, 1, 2, 3, 0, 9, 1, 2])], limits(12))
    first = {tree.tokens[node] for node in children_of(tree, ROOT)}
    assert first == {3, 5}
    assert tree.tokens[0] == 3  # followed twice
    assert len(follow(tree, [3, 4, 0])) == 3 and len(follow(tree, [5, 6])) == 2


def test_text_that_repeats_is_continued_beyond_its_end() -> None:
    (tree,) = proposed(make_drafter(), [request([7, 8] * 6)], limits(6))
    assert len(follow(tree, [7, 8, 7, 8, 7])) >= 4


def test_nothing_seen_before_gives_nothing() -> None:
    (tree,) = proposed(make_drafter(), [request([1, 2, 3])], LIMITS)
    assert len(tree) == 0


@given(
    tokens=TOKENS,
    past=st.lists(TOKENS, max_size=4),
    max_nodes=st.integers(1, 20),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_trees_are_bounded_and_best_first(
    tokens: list[int], past: list[list[int]], max_nodes: int, temperature: float
) -> None:
    drafter = make_drafter()
    for response in past:
        drafter.responses.add("a", response)
    (tree,) = proposed(drafter, [request(tokens, "a", temperature)], limits(max_nodes))
    assert len(tree) <= max_nodes
    assert set(tree.tokens.tolist()) <= set(tokens).union(*past)
    assert tree.scores.tolist() == sorted(tree.scores.tolist(), reverse=True)
    for node, parent in enumerate(tree.parents.tolist()):
        assert suffix.MIN_SCORE <= tree.scores[node] <= (0.0 if parent == ROOT else tree.scores[parent])
        assert len(children_of(tree, node)) <= suffix.CHILDREN
    larger = make_drafter()
    larger.responses = drafter.responses
    (more,) = proposed(larger, [request(tokens, "a", temperature)], limits(max_nodes + 1))
    assert more.tokens[: len(tree)].tolist() == tree.tokens.tolist()  # the best nodes, whatever the limit


@given(tokens=st.lists(st.integers(0, 2), min_size=2, max_size=40), data=st.data())
def test_growing_with_the_sequence_is_reading_it_at_once(tokens: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(1, len(tokens)))
    drafter, r = make_drafter(), request(tokens[:start])
    while True:
        (tree,) = proposed(drafter, [r], LIMITS)
        (fresh,) = proposed(make_drafter(), [request(r.tokens)], LIMITS)
        assert seen(tree) == seen(fresh)
        if len(r.tokens) == len(tokens):
            return
        step = data.draw(st.integers(1, 5))
        r.tokens += tokens[len(r.tokens) : len(r.tokens) + step]
        drafter.commit(r, r.tokens[-step:])


# -- tenants


def test_the_prompts_end_leads_to_the_first_token() -> None:
    drafter = make_drafter()
    finish(drafter, request([9, 9, 9, 1, 2, 3, 4], "a"), [10, 11])
    (tree,) = proposed(drafter, [request([6, 3, 4], "a", number=1)], LIMITS)
    assert len(follow(tree, [10, 11])) == 2
    assert drafter.responses.num_tokens == suffix.LEAD + 2


def test_both_sources_share_a_tree() -> None:
    drafter = make_drafter()
    finish(drafter, request([1], "a"), [7, 8, 20])
    (tree,) = proposed(drafter, [request([7, 8, 30, 5, 7, 8], "a", number=1)], LIMITS)
    assert {tree.tokens[node] for node in children_of(tree, ROOT)} == {20, 30}


class Trap(SuffixAutomaton):
    """Another tenant's responses: whoever looks, fails."""

    def match(self, *_: Any) -> Any:
        raise AssertionError("another tenant's responses were looked up")

    follow = contexts = match  # type: ignore[assignment]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("salt", [None, "b"])
@pytest.mark.parametrize("other", [None, "a"])
def test_nobody_else_sees_or_feels_them(
    other: str | None, salt: str | None, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the other's responses trees are those of a new drafter, score by score, and the same automata were read:
    the other's are not even opened, so drafting takes no longer for what they hold."""
    busy, fresh = make_drafter(), make_drafter()
    for number in range(5):
        finish(busy, request([1, 2, 3], other, number=number), [4, 5, 6, 1, 2, 3])
    for tenant in busy.responses._tenants.values():
        monkeypatch.setattr(tenant, "_old", Trap())
        monkeypatch.setattr(tenant, "_young", Trap())
        tenant._old.num_tokens = tenant._young.num_tokens = 1
    if other is not None:
        with pytest.raises(AssertionError, match="looked up"):
            busy.propose([request([1, 2], other, number=9)], LIMITS)
    mine = [request([2, 3, 7, 1, 2, 3], salt, temperature, number=n) for n in (10, 11)]
    for r in mine:
        assert [seen(t) for t in proposed(busy, [r], LIMITS)] == [seen(t) for t in proposed(fresh, [r], LIMITS)]
        assert len(busy.propose([r], LIMITS)[0])
    for drafter in (busy, fresh):
        finish(drafter, request([2, 3], salt, number=12), [4, 5])
    r = request([2, 3, 7, 1, 2, 3], salt, temperature, number=13)
    assert [seen(t) for t in proposed(busy, [r], LIMITS)] == [seen(t) for t in proposed(fresh, [r], LIMITS)]


def test_requests_that_run_together_do_not_see_each_other() -> None:
    drafter = make_drafter()
    drafter.propose([request([1, 2, 3], "a")], LIMITS)
    (tree,) = proposed(drafter, [request([1, 2], "a", number=1)], LIMITS)
    assert len(tree) == 0


@pytest.mark.parametrize("reason", [FinishReason.ABORT, None])
def test_what_did_not_end_by_itself_is_forgotten(reason: FinishReason) -> None:
    drafter = make_drafter()
    finish(drafter, request([1], "a"), [2, 3], reason)
    assert drafter.responses.num_tokens == 0


@pytest.mark.parametrize("make", [make_drafter, NgramDrafter])
def test_closing_forgets_the_sequence(make: Callable[[], SuffixDrafter | NgramDrafter]) -> None:
    drafter, first = make(), request([1, 2, 1])
    drafter.propose([first], LIMITS)
    finish(drafter, first, [])
    drafter.close(first)
    assert not (drafter._own if isinstance(drafter, SuffixDrafter) else drafter._indexes)
    assert [len(tree) for tree in proposed(drafter, [request([3, 1])], LIMITS)] == [0]


# -- prompt lookup: the longest suffix seen before, and what followed it the last time


def naive(tokens: list[int], max_n: int) -> tuple[int, int] | None:
    """The definition, by search."""
    for n in range(min(max_n, len(tokens) - 1), 0, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                return n, end
    return None


@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40), steps=st.lists(st.integers(1, 5), max_size=10))
def test_lookup_is_the_search(tokens: list[int], steps: list[int]) -> None:
    """However the sequence grew."""
    index, length = NgramIndex(4), 1
    for step in (0, *steps):
        length = min(length + step, len(tokens))
        index.update(tokens[:length])
        assert index.lookup(tokens[:length]) == naive(tokens[:length], 4)


def test_it_proposes_what_followed_as_a_chain() -> None:
    (tree,) = proposed(NgramDrafter(), [request([1, 2, 3, 4, 5, 6, 1, 2])], limits(3))
    assert tree.tokens.tolist() == [3, 4, 5]
    assert tree.depths.tolist() == [1, 2, 3]
