"""A state along a tree against a matcher that replays each path from the root."""

import random
from functools import cache

import numpy as np
import pytest
from json_schemas import object_of
from pycode_grammars import AMBIGUOUS, EOS, VOCAB, grammars, ids, state_at, tokenizer
from sizes import sized

from pilotfish.core.sampling.constraint import Constraint, words
from pilotfish.grammar.state import MatcherState

ALL = set(range(words(VOCAB) * 32))
CHOICES = Constraint.choice(["abc", "abd"])
TAGS = {"type": "array", "items": {"enum": ["a", "ab"]}}
SCHEMA = Constraint.json(object_of("name", "tags", name={"type": "string", "maxLength": 12}, tags=TAGS))


def legal(of: MatcherState, path: list[int]) -> set[int]:
    bits = np.full(words(VOCAB), -1, np.int32)
    of.mask(path, bits)
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def replayed(committed: list[int], path: list[int], constraint: Constraint = SCHEMA) -> set[int]:
    return legal(state_at([*committed, *path], constraint), [])


def going_on(committed: list[int], path: list[int], constraint: Constraint = SCHEMA) -> set[int]:
    """What may follow; nothing where the output has ended."""
    following = replayed(committed, path, constraint)
    return set() if following == {EOS} else following


@pytest.mark.parametrize("seed", range(sized(4, 20)))
def test_every_path_is_judged_as_if_it_was_the_output(seed: int) -> None:
    """Random legal outputs; at each length a random tree below, its nodes visited in any order."""
    rng, tracked, committed = random.Random(seed), state_at([], SCHEMA), list[int]()
    while not tracked.ended and len(committed) < 30:
        paths = [[]]
        for _ in range(8):
            below = rng.choice([path for path in paths if path[-1:] != [EOS]])
            choices = sorted(going_on(committed, below)) if rng.random() < 0.8 else list(range(1, VOCAB))
            if choices:
                paths.append([*below, rng.choice(choices)])
                allowed = paths[-1][-1] in going_on(committed, below)
                assert tracked.allows(paths[-1]) == allowed
                if not allowed:
                    paths.pop()
        rng.shuffle(paths)
        for path in paths:
            assert legal(tracked, path) == replayed(committed, path)
        step = rng.choice(sorted(replayed(committed, []) - {EOS}))
        committed.append(step)
        tracked.extend(step)
        assert tracked.problem is None


def test_a_whole_output_has_ended() -> None:
    tracked = state_at([], SCHEMA)
    for token in ids('{"name": "x", "tags": ["ab", "a"]}'):
        assert not tracked.ended
        tracked.extend(token)
    assert tracked.ended
    assert legal(tracked, []) == {EOS}
    guessed, whole = state_at([], Constraint.choice(["a"])), ids("a")
    assert guessed.allows(whole) and not guessed.allows([*whole, EOS]) and not guessed.allows([*whole, whole[0]])
    assert not guessed.ended


def test_the_only_way_on_is_forced() -> None:
    tracked = state_at([], Constraint.choice(["return value", "return valid"]))
    forced = list(tracked.forced([]))
    assert tokenizer().decode(forced).startswith("return")
    assert "return val".startswith(tokenizer().decode(forced))
    assert all(tracked.allows(forced[: i + 1]) for i in range(len(forced)))


def test_a_token_that_is_not_legal_leaves_a_problem_and_no_tokens() -> None:
    tracked = state_at(ids("x"), SCHEMA)
    assert tracked.problem == f"token {ids('x')[0]} is not in the grammar"
    assert legal(tracked, []) == set()
    assert not tracked.ended


@pytest.mark.parametrize("mark", [[7], [7, 8], [7, 8, 7]])
@pytest.mark.parametrize("before", [[], [5], [7], [7, 5, 7]])
def test_it_begins_after_its_mark(mark: list[int], before: list[int]) -> None:
    """Wherever the mark lies: in the output, across its end, or in the tree."""
    whole, given = ids("a"), [*before, *mark]
    begins = next(i for i in range(len(given) + 1) if given[:i][-len(mark) :] == mark)
    for committed in range(begins + 1):
        tracked = state_at(given[:committed], Constraint.choice(["a"]), mark)
        for end in range(committed, begins):
            assert legal(tracked, given[committed:end]) == ALL
        assert legal(tracked, given[committed:begins]) == set(whole)
        assert tracked.allows([*given[committed:begins], *whole])
        assert not tracked.allows([*given[committed:begins], ids("b")[0]])
        assert not tracked.ended


def test_it_begins_after_a_tree_went_on_beyond_its_mark() -> None:
    tracked, whole, mark = state_at([], CHOICES, [7]), ids("ab"), [5, 7]
    for place, token in enumerate(mark):
        assert tracked.allows([*mark[place:], *whole])
        tracked.extend(token)
    assert tracked.allows(whole)
    assert not tracked.ended
    assert legal(tracked, []) == replayed([], [], CHOICES)


def test_masks_of_other_paths_leave_no_trace() -> None:
    """Where a rollback comes after a mask, llguidance gives that mask again for some paths."""
    committed, other, path = ids('{"name":'), ids(' ""\n'), [*ids('""'), *ids(","), *ids("\r"), *ids("\n")]
    tracked = state_at(committed, SCHEMA)
    assert legal(tracked, other) == replayed(committed, other)
    assert legal(tracked, path) == replayed(committed, path)
    for token in path:
        tracked.extend(token)
    assert legal(tracked, []) == replayed(committed, path)


@pytest.mark.parametrize("pattern", ["a*", "a?", "a{0,2}b?"])
def test_the_end_is_a_node_like_others(pattern: str) -> None:
    """Also where the whole output may be empty."""
    constraint, a = Constraint.regex(pattern), ids("a")[0]
    tracked = state_at([], constraint)
    assert not tracked.ended and EOS in legal(tracked, [])
    for path in ([EOS], [a], [a, EOS], [], [EOS], [a]):
        allowed = not path or path[-1] in going_on([], path[:-1], constraint)
        assert not path or tracked.allows(path) == allowed
        assert not allowed or legal(tracked, path) == replayed([], path, constraint)
    tracked.extend(EOS)
    assert tracked.ended and tracked.problem is None


@cache
def steps_to_the_limit() -> int:
    """Of an output that nobody guesses at."""
    tracked, a = state_at([], AMBIGUOUS), ids("a")[0]
    for step in range(3000):
        legal(tracked, [])
        tracked.extend(a)
        if tracked.problem is not None:
            return step
    raise AssertionError


@pytest.mark.parametrize("how", ["allows", "mask", "forced"])
def test_a_guess_that_reaches_a_limit_changes_no_output(how: str) -> None:
    """It is not legal, no other is from then on; the output ends where it does without any guess."""
    a, limit = ids("a")[0], steps_to_the_limit()
    tracked = state_at([a] * (limit - 10), AMBIGUOUS)
    if how == "allows":
        guesses = [tracked.allows([a] * depth) for depth in range(1, 40)]
        assert guesses[0] and not guesses[-1] and not tracked.allows([a])
    elif how == "mask":
        masks = [legal(tracked, [a] * depth) for depth in range(40)]
        assert masks[0] == masks[1] == {a, EOS} and masks[-1] == set()
    else:
        assert [list(tracked.forced([a] * depth)) for depth in range(40)] == [[]] * 40
    assert legal(tracked, []) == {a, EOS}
    for step in range(limit - 10, limit + 1):
        assert tracked.problem is None, step
        legal(tracked, [])
        tracked.extend(a)
    assert tracked.problem is not None and not tracked.ended


def test_an_output_that_opens_no_reasoning_follows_at_once() -> None:
    """Its first token decides; afterwards the opening is a token like others."""
    whole, opening, mark = ids("abc"), 7, [8]
    tracked = MatcherState(grammars().compile(CHOICES), mark, opening)
    assert legal(tracked, []) == {*replayed([], [], CHOICES), opening}
    assert tracked.forced([]) == () and tracked.allows([opening]) and tracked.allows(whole)
    assert legal(tracked, [opening]) == legal(tracked, [opening, 5]) == ALL
    assert legal(tracked, [opening, 5, *mark]) == replayed([], [], CHOICES)
    assert legal(tracked, whole[:1]) == replayed([], whole[:1], CHOICES)
    assert not tracked.allows([whole[0], opening])
    for token in whole:
        tracked.extend(token)
    assert tracked.ended


def test_an_output_that_opens_a_reasoning_follows_after_it() -> None:
    tracked = MatcherState(grammars().compile(CHOICES), [8], 7)
    assert tracked.allows(ids("ab"))  # a guess that does not come true
    for token in (7, 7, 5):
        tracked.extend(token)
        assert legal(tracked, []) == ALL
    tracked.extend(8)
    assert legal(tracked, []) == replayed([], [], CHOICES)
    assert tracked.allows(ids("abc")) and not tracked.ended
