"""Masks of many paths in one call, against each path's own."""

import random
import threading
from collections.abc import Iterator, Sequence
from threading import Event

import numpy as np
import pytest
from pycode_grammars import AMBIGUOUS, EOS, VOCAB, grammars, ids, new_grammars
from pycode_grammars import state_at as at
from sizes import sized
from test_state import SCHEMA, going_on, legal, replayed, steps_to_the_limit

from pilotfish.core.sampling.constraint import Bits, Constraint, GrammarState, MaskedPaths, masks_when_asked, words
from pilotfish.errors import ParameterError
from pilotfish.grammar.state import MatcherState
from pilotfish.grammar.threads import GrammarThreads

CHOICE = Constraint.choice(["def main", "def mist", "return"])
OPEN = Constraint.regex("[ab]{0,4}c?")


@pytest.fixture(scope="module")
def threads() -> Iterator[GrammarThreads]:
    threads = GrammarThreads(grammars())
    yield threads
    threads.close()


def grown(rng: random.Random, constraint: Constraint, length: int) -> tuple[list[int], list[list[int]]]:
    """A random legal output, and the legal paths of a tree below it, its root's first."""
    committed = list[int]()
    while len(committed) < length and (choices := sorted(replayed(committed, [], constraint) - {EOS})):
        committed.append(rng.choice(choices))
    paths = [list[int]()]
    for _ in range(10):
        below = rng.choice([path for path in paths if path[-1:] != [EOS]])
        choices = sorted(going_on(committed, below, constraint))
        if choices and (path := [*below, rng.choice(choices)]) not in paths:
            paths.append(path)
    return committed, paths


def mask_of(state: GrammarState, path: Sequence[int]) -> Bits:
    bits = np.zeros(words(VOCAB), np.int32)
    state.mask(path, bits)
    return bits


@pytest.mark.parametrize("seed", range(sized(2, 12)))
@pytest.mark.parametrize("which", ["tree", "leaves", "any order"])
def test_masks_of_many_sequences_are_those_of_each_path(threads: GrammarThreads, seed: int, which: str) -> None:
    """Whole trees as a target has them, leaves alone as a draft has them."""
    rng, fast, slow = random.Random(seed), list[MaskedPaths](), list[MaskedPaths]()
    for _ in range(3):
        constraint = rng.choice([SCHEMA, CHOICE, OPEN])
        committed, paths = grown(rng, constraint, rng.randrange(12))
        if which == "leaves":
            paths = [path for path in paths if not any(other[: len(path)] == path for other in paths if other != path)]
        if which == "any order":
            rng.shuffle(paths)
        for masked in (fast, slow):
            masked.append(MaskedPaths(at(committed, constraint), paths))
    assert np.array_equal(threads.masks(fast, VOCAB)(), masks_when_asked(slow, VOCAB)())
    for one, other in zip(fast, slow, strict=True):  # they stand where they stood
        for path in one.paths:
            assert np.array_equal(mask_of(one.state, path), mask_of(other.state, path))


def test_paths_before_the_beginning_are_free(threads: GrammarThreads) -> None:
    paths = [[], [5], [5, 7], [7], [7, *ids("return")[:1]]]
    (free, other, begun, early, below) = threads.masks([MaskedPaths(at([], CHOICE, [7]), paths)], VOCAB)()
    assert (free == -1).all() and (other == -1).all()
    for row, path in ((begun, []), (early, []), (below, ids("return")[:1])):
        assert row.any() and np.array_equal(row, mask_of(at([], CHOICE), path))


def test_where_nothing_can_be_told_nothing_is_allowed(threads: GrammarThreads) -> None:
    broken, whole = at([], CHOICE), at([], CHOICE)
    broken.fail("a limit")
    bits = threads.masks([MaskedPaths(broken, [[], ids("return")[:1]]), MaskedPaths(whole, [[]])], VOCAB)()
    assert not bits[:2].any() and bits[2].any()


def test_a_grammar_comes_once_it_is_compiled(threads: GrammarThreads) -> None:
    pending = threads.pending(CHOICE)
    threads.compile(CHOICE).result()
    state, other = pending(), pending()
    assert isinstance(state, MatcherState) and state is not other
    state.extend(ids("return")[0])
    assert isinstance(other, MatcherState) and legal(other, []) == legal(at([], CHOICE), [])
    bad = threads.pending(Constraint.regex("a{3"))
    with pytest.raises(ParameterError):
        threads.compile(Constraint.regex("a{3")).result()
    assert bad() is None


@pytest.mark.parametrize("vocab_size", [100, VOCAB - 500, VOCAB - 4, VOCAB, VOCAB + 500])
def test_a_draft_may_have_another_number_of_embeddings(threads: GrammarThreads, vocab_size: int) -> None:
    """Models of one tokenizer pad their vocabularies differently."""
    paths = [[], ids("a"), ids("ab")]
    own = threads.masks([MaskedPaths(at([], OPEN), paths)], VOCAB)()
    got = threads.masks([MaskedPaths(at([], OPEN), paths)], vocab_size)()
    assert got.shape == (3, words(vocab_size)) and got.flags.c_contiguous
    both = min(got.shape[1], own.shape[1])
    assert np.array_equal(got[:, :both], own[:, :both]) and not got[:, both:].any()


def test_a_guess_that_reaches_a_limit_ends_no_output(threads: GrammarThreads) -> None:
    a, limit = ids("a")[0], steps_to_the_limit()
    states = [at([a] * (limit - 3), AMBIGUOUS), at([a] * (limit + 1), AMBIGUOUS), at([], CHOICE)]
    paths = [[], [a], *([a] * depth for depth in range(2, 20))]
    bits = threads.masks(
        [MaskedPaths(state, paths if place == 0 else [[]]) for place, state in enumerate(states)], VOCAB
    )()
    assert bits[0].any() and not bits[19].any() and not bits[20].any() and bits[21].any()
    assert [state.problem is None for state in states] == [True, False, True]
    assert legal(states[0], []) == {a, EOS}


def test_what_is_known_waits_for_no_other(threads: GrammarThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, bad, released = Constraint.regex("[xyz]{7}"), Constraint.regex("a{4"), Event()
    threads.compile(CHOICE).result()
    with pytest.raises(ParameterError):
        threads.compile(bad).result()
    compile_now = grammars().compile
    monkeypatch.setattr(grammars(), "compile", lambda one: (released.wait(10), compile_now(one))[1])
    waiting, pending = threads.compile(slow), threads.pending(slow)
    try:
        assert threads.compile(CHOICE).done() and threads.pending(CHOICE)() is not None
        assert isinstance(threads.compile(bad).exception(0), ParameterError) and threads.pending(bad)() is None
        assert not waiting.done() and pending() is None
    finally:
        released.set()
    assert waiting.result() is not None


def test_nothing_is_left_when_it_is_closed() -> None:
    """No process of trials, no thread."""
    made = new_grammars()
    before = set(threading.enumerate())
    threads = GrammarThreads(made)
    threads.masks([MaskedPaths(MatcherState(threads.compile(OPEN).result()), [[]])], VOCAB)()
    process = made._trial._process
    assert process is not None and process.poll() is None
    threads.close()
    threads.close()
    assert process.returncode is not None and process.stdin is not None and process.stdin.closed
    assert set(threading.enumerate()) == before


def test_an_output_may_open_a_reasoning(threads: GrammarThreads) -> None:
    opening, whole = 40, ids("return")
    paths = [whole[:1], [], [opening], [opening, 8]]
    state = MatcherState(grammars().compile(CHOICE), [8], opening)
    (below, root, open_, after) = threads.masks([MaskedPaths(state, paths)], VOCAB)()
    for row, path in ((below, whole[:1]), (after, [])):
        assert np.array_equal(row, mask_of(at([], CHOICE), path))
    assert (open_ == -1).all()
    root[opening // 32] &= ~np.int32(1 << opening % 32)
    assert np.array_equal(root, after)
