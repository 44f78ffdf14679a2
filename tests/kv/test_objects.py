"""An object is what it was made from, or not intact."""

from __future__ import annotations

import dataclasses
import zlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kv_objects import OBJECT_BYTES, some_kv

from pilotfish.core.cache.prefix_keys import KEY_BYTES, OBJECT_TOKENS
from pilotfish.kv.readers import content


def test_an_object_is_intact_for_its_tokens_alone() -> None:
    kv = some_kv()
    assert kv.intact(kv.tokens) and kv.intact(kv.tokens.tolist())
    assert not kv.intact(kv.tokens[:-1]) and not kv.intact([*kv.tokens.tolist()[:-1], 5]) and not kv.intact([])


def test_the_checksum_is_crc32_of_key_tokens_and_data() -> None:
    kv = some_kv()
    assert kv.checksum == zlib.crc32(kv.key + kv.tokens.astype("<u4").tobytes() + kv.data.tobytes())


@given(bit=st.integers(0, 8 * (KEY_BYTES + 4 * OBJECT_TOKENS + OBJECT_BYTES) - 1))
def test_any_bit_that_flips_is_found(bit: int) -> None:
    kv = some_kv()
    contents = np.frombuffer(kv.key + kv.tokens.tobytes() + kv.data.tobytes(), np.uint8).copy()
    contents[bit // 8] ^= 1 << bit % 8
    tokens = contents[KEY_BYTES : KEY_BYTES + 4 * OBJECT_TOKENS].view(np.uint32)
    data = contents[KEY_BYTES + 4 * OBJECT_TOKENS :]
    damaged = dataclasses.replace(kv, key=contents[:KEY_BYTES].tobytes(), tokens=tokens, data=data)
    assert not damaged.intact(tokens) and not damaged.intact(kv.tokens)


def test_data_is_not_copied() -> None:
    kv = some_kv()
    kv.data[3] ^= 1
    assert not kv.intact(kv.tokens)


@given(data=st.binary(max_size=20_000))
def test_a_segments_checksum_is_crc32_of_its_bytes(data: bytes) -> None:
    assert content(memoryview(data)) == zlib.crc32(data)
