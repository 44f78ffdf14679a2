"""Keys name prefixes: equal ones only for equal tokens, tenants and shapes."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.core.cache.prefix_keys import KEY_BYTES, OBJECT_TOKENS, prefix_keys, root_key

ROOT = root_key(b"shape", None)
tokens = st.lists(st.integers(0, 5), max_size=4 * OBJECT_TOKENS)


def test_roots_differ_by_shape_and_salt() -> None:
    roots = [root_key(shape, salt) for shape in (b"a", b"b", b"") for salt in (None, "", "a", "b", "salt")]
    assert len(set(roots)) == len(roots)
    assert {len(root) for root in roots} == {KEY_BYTES}


def test_a_key_is_the_hash_of_the_one_above_and_its_tokens() -> None:
    ids, key = [i * 1_000_003 % (1 << 31) for i in range(3 * OBJECT_TOKENS)], ROOT
    for place, found in enumerate(prefix_keys(ROOT, ids)):
        own = ids[place * OBJECT_TOKENS : (place + 1) * OBJECT_TOKENS]
        key = hashlib.sha256(key + struct.pack(f"<{OBJECT_TOKENS}I", *own)).digest()
        assert found == key


@pytest.mark.parametrize(("count", "keys"), [(0, 0), (1, 0), (63, 0), (64, 1), (127, 1), (128, 2), (200, 3)])
def test_only_whole_objects_have_keys(count: int, keys: int) -> None:
    assert len(prefix_keys(ROOT, [7] * count)) == keys


@given(tokens, tokens)
def test_keys_are_equal_as_far_as_all_tokens_are(one: list[int], other: list[int]) -> None:
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    pairs = list(zip(prefix_keys(ROOT, one), prefix_keys(ROOT, other), strict=False))
    assert [a == b for a, b in pairs] == [(place + 1) * OBJECT_TOKENS <= same for place in range(len(pairs))]
