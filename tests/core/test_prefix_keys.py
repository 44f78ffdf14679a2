"""Keys of prefixes: equal for equal tokens, tenants and shapes alone. One stands for the tokens that a target told
under a salt, or for none."""

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.core.cache import prefix_keys
from pilotfish.core.cache.prefix_keys import KEY_BYTES, KnownPrefixes, ToldPrefixes, root_key, text_root

SALT = b"s" * 16
SIZE = 4
ROOT = root_key(b"shape", None)
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=4 * SIZE)
salts = st.sampled_from([None, SALT, b"t" * 16])


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of few tokens."""
    monkeypatch.setattr(prefix_keys, "OBJECT_TOKENS", SIZE)


def test_roots_differ_by_shape_and_salt() -> None:
    roots = [root_key(shape, salt) for shape in (b"a", b"b", b"") for salt in (None, "", "a", "b", "salt")]
    assert len(set(roots)) == len(roots)
    assert {len(root) for root in roots} == {KEY_BYTES}


def test_a_key_is_the_hash_of_the_one_above_and_its_tokens() -> None:
    ids, key = [i * 1_000_003 % (1 << 31) for i in range(3 * SIZE)], ROOT
    for place, found in enumerate(prefix_keys.prefix_keys(ROOT, ids)):
        own = ids[place * SIZE : (place + 1) * SIZE]
        key = hashlib.sha256(key + struct.pack(f"<{SIZE}I", *own)).digest()
        assert found == key


@pytest.mark.parametrize(("count", "keys"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (13, 3)])
def test_only_whole_objects_have_keys(count: int, keys: int) -> None:
    assert len(prefix_keys.prefix_keys(ROOT, [7] * count)) == keys


@given(tokens, tokens)
def test_keys_are_equal_as_far_as_all_tokens_are(one: list[int], other: list[int]) -> None:
    pairs = list(zip(prefix_keys.prefix_keys(ROOT, one), prefix_keys.prefix_keys(ROOT, other), strict=False))
    assert [a == b for a, b in pairs] == [(place + 1) * SIZE <= common(one, other) for place in range(len(pairs))]


def test_keys_begin_with_the_salts_digest() -> None:
    assert text_root(None) == root_key(b"", None) and text_root(SALT) == root_key(b"", SALT.hex())


@given(st.lists(st.tuples(salts, tokens), max_size=6), salts, tokens, st.integers(0, 3))
def test_what_was_told_of_a_sequence_is_its_longest_prefix_in_whole_keys(
    sequences: list[tuple[bytes | None, list[int]]], salt: bytes | None, asked: list[int], kept: int
) -> None:
    told = ToldPrefixes()
    for own, sequence in sequences:
        told.tell(own, sequence)
    alike = [common(sequence, asked) for own, sequence in sequences if own == salt]
    assert told.known(salt, asked) == max(alike, default=0)
    told.forget(salt, asked, kept * SIZE)
    assert told.known(salt, asked) == min(max(alike, default=0), kept * SIZE)


def common(one: list[int], other: list[int]) -> int:
    """First tokens that both have, in whole keys."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return same // SIZE * SIZE


@given(st.lists(st.tuples(salts, tokens), max_size=12), st.integers(1, 30))
def test_both_sides_have_the_same_sequence_or_the_draft_knows_that_it_has_none(
    sequences: list[tuple[bytes | None, list[int]]], most: int
) -> None:
    told, known = ToldPrefixes(), KnownPrefixes(most)
    for salt, whole in sequences:
        key, rest = told.shorten(salt, whole)
        assert len(rest) > 0 and (key is not None or rest == whole)
        if key is not None:
            prefix = known.find(b"target", salt, key)
            assert prefix is None or [*prefix, *rest] == whole
            assert prefix is not None or len(known) == most  # some had to be forgotten
        known.add(b"target", salt, whole)
        assert len(known) <= most


def test_what_came_after_an_open_is_named_too() -> None:
    told, whole = ToldPrefixes(), list(range(3 * SIZE))
    told.shorten(SALT, whole[:SIZE])
    told.tell(SALT, whole)
    assert told.shorten(SALT, [*whole, 1])[1] == [1]
    assert told.shorten(None, [*whole, 1])[0] is None  # of another salt
    told.clear()
    assert told.shorten(SALT, [*whole, 1])[0] is None


def test_a_key_is_known_to_whom_it_was_told_alone() -> None:
    """And under its salt; a key of other tokens, or of a part of 64, is of nothing."""
    known, whole = KnownPrefixes(), list(range(2 * SIZE))
    known.add(b"one", SALT, whole)
    first, second = prefix_keys.prefix_keys(text_root(SALT), whole)
    assert known.find(b"one", SALT, first) == whole[:SIZE] and known.find(b"one", SALT, second) == whole
    assert known.find(b"one", SALT, text_root(SALT)) == []
    for target, salt, key in (
        *((b"two", SALT, second), (b"one", None, second), (b"one", b"t" * 16, second)),
        (b"one", SALT, text_root(None)),
        (b"one", SALT, hashlib.sha256(text_root(SALT) + np.array(whole[: SIZE - 1], "<u4").tobytes()).digest()),
        *((b"one", SALT, prefix_keys.prefix_keys(first, whole[:SIZE])[0]), (b"one", SALT, b"k" * 32)),
    ):
        assert known.find(target, salt, key) is None
    known.forget(b"one")
    assert known.find(b"one", SALT, first) is None and len(known) == 0


def test_what_was_used_longest_ago_is_forgotten() -> None:
    """Its end first; of the target with the most."""
    known = KnownPrefixes(most=4)
    chains = {name: [(name * 3 + i) % 100 for i in range(3 * SIZE)] for name in (1, 20)}
    keys = {name: prefix_keys.prefix_keys(text_root(None), chain) for name, chain in chains.items()}
    known.add(b"modest", None, chains[20][:SIZE])
    for name in (1, 20):
        known.add(b"flood", None, chains[name])
    assert len(known) == 4 and known.find(b"modest", None, keys[20][0]) == chains[20][:SIZE]
    assert known.find(b"flood", None, keys[20][2]) == chains[20]
    assert known.find(b"flood", None, keys[1][0]) is None
    short = KnownPrefixes(most=2)
    short.add(b"target", None, chains[1])
    assert [short.find(b"target", None, key) is None for key in keys[1]] == [False, False, True]
    told = ToldPrefixes(most=2)
    told.tell(None, chains[1])
    assert told.shorten(None, [*chains[1], 5])[1] == [*chains[1][2 * SIZE :], 5]
    told = ToldPrefixes(most=3)
    for name in (1, 20):
        told.tell(None, chains[name])
        assert len(told) == 3
    assert told.shorten(None, [*chains[1], 5])[0] is None
