"""The LM drafter: guesses that mirror the noise, KV that is kept where it was right, no slot lost."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import VOCAB, RowSampling, children_of, follow, limits, native_model, paths_of, proposed, sampling_of

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import NO_NODES, Outcome, Sampling, SequenceRows
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.lookahead import Lookahead
from pilotfish.core.trees.tree import ROOT
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.sampling import sample
from pilotfish.workers.lm import LMDrafter

WIDTH, CHILDREN = 3, 4
LIMITS = limits(nodes=12, levels=3)


def make_drafter(directory: Path, width: int = WIDTH, children: int = CHILDREN, slots: int = 600) -> LMDrafter:
    return LMDrafter(TorchExecutor(native_model(directory), slots, vocab_size=VOCAB), width, children)


def make_request(number: int = 0, prompt: int = 10, max_tokens: int = 50, **params: float) -> Request:
    tokens = np.random.default_rng(number).integers(0, VOCAB, prompt).tolist()
    p = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    return Request(number, tokens, p, 100 + number, frozenset(), 10_000)


def with_grandchildren(tree: Lookahead) -> int:
    """A node with KV, above another one."""
    above = {tuple(tree.path(node)[:-1]) for node in tree.expanded}
    return next(node for node in tree.expanded if tuple(tree.path(node)) in above)


def next_token(directory: Path, request: Request) -> int:
    """What the model itself would give next."""
    count = len(request.tokens)
    rows = SequenceRows(0, request.tokens, np.arange(count, dtype=np.int32), NO_NODES, kept=[count - 1])
    logits = TorchExecutor(native_model(directory), count).forward([rows])
    return sample(logits, sampling_of([RowSampling(request.params, request.seed, count)]))[0]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_like_its_target_never_errs(llama: Path, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain is what the model samples: noise, positions and filters are mirrored."""
    monkeypatch.setattr(Lookahead, "FLOOR", -100.0)
    drafter, request = make_drafter(llama, 1, 1), make_request(temperature=temperature, top_k=20)
    for _ in range(3):
        (tree,) = proposed(drafter, [request], LIMITS)
        expected = []
        for _ in range(LIMITS.levels):
            expected.append(next_token(llama, request))
            request.extend(expected[-1:])
        assert len(follow(tree, expected)) == LIMITS.levels
        drafter.commit(request, expected)
        drafter.table.check()


def test_a_surviving_subtree_keeps_its_kv(llama: Path) -> None:
    """Only new leaves are computed, and all guesses are those of a fresh session."""
    drafter, request = make_drafter(llama), make_request(temperature=0.8)
    drafter.propose([request], LIMITS)
    (session,) = drafter.table
    tree, inner = session.tree, with_grandchildren(session.tree)
    before, tokens, slots = len(session.slots), tree.path_tokens(inner), tree.path(inner)
    kept = {tree.path(node)[-1] for node in tree.expanded if tree.path(node)[: len(slots)] == slots} - {slots[-1]}
    request.extend(tokens)
    assert not drafter.commit(request, tokens)
    drafter.table.check()
    assert session.slots[before:].tolist() == slots and set(session.tree.slots) == kept
    (tree,) = proposed(drafter, [request], LIMITS)
    (fresh,) = proposed(make_drafter(llama), [request], LIMITS)
    ours, theirs = paths_of(tree), paths_of(fresh)
    assert drafter.levels == LIMITS.levels and max(tree.depths) >= max(fresh.depths)
    assert {path: ours[path] for path in ours.keys() & theirs.keys()} == pytest.approx(
        {path: theirs[path] for path in ours.keys() & theirs.keys()}, abs=1e-4
    )
    assert sum(np.exp(list(ours.values()))) > sum(np.exp(list(theirs.values()))) - 1e-4


def test_a_level_that_does_not_pay_is_not_run(llama: Path) -> None:
    """Roots are expanded whatever they cost; a kept tree is proposed as it is."""
    ticks = itertools.count()
    executor = TorchExecutor(native_model(llama), 600, vocab_size=VOCAB)
    drafter, request = LMDrafter(executor, WIDTH, clock=lambda: float(next(ticks))), make_request(temperature=0.8)
    drafter.propose([request], LIMITS)
    assert drafter.levels == LIMITS.levels
    dear = replace(LIMITS, price=1e6)
    (session,) = drafter.table
    tokens = session.tree.path_tokens(session.tree.expanded[0])
    request.extend(tokens)
    drafter.commit(request, tokens)
    (tree,) = proposed(drafter, [request], dear)
    assert drafter.levels == 0 and len(tree) > 0
    request.extend([1])
    drafter.commit(request, [1])
    (tree,) = proposed(drafter, [request], dear)
    assert drafter.levels == 1 and max(tree.depths) == 1


def test_kept_trees_give_way_where_slots_are_short(llama: Path) -> None:
    drafter, one, other = make_drafter(llama, slots=60), make_request(0), make_request(1, prompt=30)
    drafter.propose([one], LIMITS)
    (session,) = drafter.table
    tokens = session.tree.path_tokens(with_grandchildren(session.tree))
    one.extend(tokens)
    drafter.commit(one, tokens)
    held = len(session.slots) + len(session.tree.slots)
    assert len(session.tree) and drafter.table.pool.num_free < 30 + 9 + held
    drafter.table.pool.allocate(drafter.table.pool.num_free - 30 - 9 + 1)  # as if by others
    (tree,) = proposed(drafter, [other], LIMITS)
    assert len(tree) > 0 and not len(session.tree) and session.num_pending == 1


def test_filters_leave_no_guess_that_cannot_be(llama: Path) -> None:
    (tree,) = proposed(make_drafter(llama), [make_request(temperature=1.0, top_k=1)], LIMITS)
    assert all(len(children_of(tree, node)) <= 1 for node in (ROOT, *range(len(tree))))
    assert all(score > -np.inf for score in tree.scores)


def test_no_level_beyond_the_last_token(llama: Path) -> None:
    (tree,) = proposed(make_drafter(llama), [make_request(max_tokens=1, temperature=0.0)], LIMITS)
    assert len(tree) == 0  # the target draws it after the last committed one
    (tree,) = proposed(make_drafter(llama), [make_request(max_tokens=2, temperature=0.0)], LIMITS)
    assert set(tree.depths) == {1}


def test_without_slots_there_are_no_guesses(llama: Path) -> None:
    drafter = make_drafter(llama, slots=50)
    small, large = make_request(0, prompt=10), make_request(1, prompt=60)
    trees = proposed(drafter, [large, small], LIMITS)
    assert [len(tree) > 0 for tree in trees] == [False, True]
    drafter.table.check()
    for request in (small, large):
        drafter.close(request)
    assert drafter.table.pool.num_available == 50


def executed(drafter: LMDrafter, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Committed tokens of each forward from now on."""
    counts, execute = list[int](), drafter.executor.execute

    def counted(sequences: Sequence[SequenceRows], sampling: Sampling) -> Outcome:
        counts.append(sum(len(one.tokens) for one in sequences))
        return execute(sequences, sampling)

    monkeypatch.setattr(drafter.executor, "execute", counted)
    return counts


def test_the_next_turn_computes_only_what_is_new(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And guesses what a fresh session does, under any seed and parameters; of another salt it finds nothing."""
    drafter, first = make_drafter(llama), make_request(prompt=60, temperature=0.8)
    proposed(drafter, [first], LIMITS)
    first.extend([7])
    drafter.commit(first, [7])
    proposed(drafter, [first], LIMITS)
    drafter.close(first)
    counts = executed(drafter, monkeypatch)
    for salt, rows in ((None, 5), ("a", 66), ("a", 1)):
        params = SamplingParams(max_tokens=20, temperature=0.0)
        second = Request(5, [*first.tokens, 1, 2, 3, 4, 5], params, 3, frozenset(), 10_000, cache_salt=salt)
        (tree,) = proposed(drafter, [second], LIMITS)
        assert counts[0] == rows
        (fresh,) = proposed(make_drafter(llama), [second], LIMITS)
        assert paths_of(tree) == pytest.approx(paths_of(fresh))
        drafter.close(second)
        drafter.table.check()
        counts.clear()


def test_what_a_request_without_guesses_held_serves_the_others(llama: Path) -> None:
    """Else what two have found in the cache would keep both from going on."""
    drafter, requests = make_drafter(llama, slots=120), [make_request(number, prompt=50) for number in range(2)]
    for request in requests:
        assert len(proposed(drafter, [request], LIMITS)[0])
        drafter.close(request)
    longer = [Request(9 + r.id, [*r.tokens, *range(25)], r.params, 1, frozenset(), 10_000) for r in requests]
    assert sum(len(tree) > 0 for tree in proposed(drafter, longer, LIMITS)) == 1
    drafter.table.check()
