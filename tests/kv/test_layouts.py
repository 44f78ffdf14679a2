"""KV of ranks that have some heads each: what is made of it is KV of the heads that were asked for, bit for bit."""

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.core.prefilling.segments import KVLayout
from pilotfish.errors import SegmentError
from pilotfish.kv.arena import Bytes
from pilotfish.kv.layouts import converted, convertible

MODEL = KVLayout(layers=4, first_head=0, heads=8, planes=[6, 6, 4])


def rank(first: int, heads: int) -> KVLayout:
    return msgspec.structs.replace(MODEL, first_head=first, heads=heads)


def segment(layout: KVLayout, layers: int, tokens: int, features: int = 0) -> Bytes:
    """Of a layout, cut out of the model's KV, which is the same for all: the reference. Then so many bytes of each
    token's feature."""
    made = np.random.default_rng(0)
    heads = slice(layout.first_head, layout.first_head + layout.heads)
    planes = [
        made.integers(0, 256, (tokens, MODEL.heads, size), np.uint8)[:, heads].ravel()
        for _ in range(layers)
        for size in layout.planes
    ]
    return np.concatenate([*planes, np.arange(tokens * features, dtype=np.uint8)])


@given(cuts=st.sets(st.integers(1, 7)), first=st.integers(0, 7), data=st.data())
def test_heads_of_ranks_become_heads_of_ours(cuts: set[int], first: int, data: st.DataObject) -> None:
    ours = rank(first, data.draw(st.integers(1, 8 - first)))
    layers, tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    edges = [0, *sorted(cuts), 8]
    ranks = data.draw(st.permutations([rank(a, b - a) for a, b in itertools.pairwise(edges)]))
    parts = [(one, segment(one, layers, tokens)) for one in ranks]
    assert convertible(ranks, ours)
    assert np.array_equal(converted(parts, ours, range(layers), tokens), segment(ours, layers, tokens))


def test_a_segment_of_our_own_layout_is_not_copied() -> None:
    data = segment(MODEL, 2, 3)
    assert converted([(MODEL, data)], MODEL, range(2), 3) is data


@pytest.mark.parametrize("layers", [range(1, 4), range(2, 5), range(4, 5)])
def test_features_are_those_of_any_rank(layers: range) -> None:
    theirs, ours = (
        [msgspec.structs.replace(one, layers=5, features=7) for one in some]
        for some in ([rank(0, 5), rank(5, 3)], [MODEL])
    )
    of_kv, size = min(layers.stop, 4) - layers.start, 7 * (layers.stop == 5)
    parts = [(one, segment(one, of_kv, 3, size)) for one in theirs]
    assert np.array_equal(converted(parts, ours[0], layers, 3), segment(ours[0], of_kv, 3, size))


@pytest.mark.parametrize(
    "theirs",
    [
        [rank(0, 4)],
        [rank(4, 4)],
        [rank(0, 3), rank(4, 4)],
        [],
        [KVLayout(layers=4, first_head=0, heads=8, planes=[6, 6])],
        [KVLayout(layers=4, first_head=0, heads=8, planes=[3, 3, 4])],
        [KVLayout(layers=5, first_head=0, heads=8, planes=[6, 6, 4])],
        [rank(0, 8), KVLayout(layers=4, first_head=0, heads=8, planes=[12, 12])],
        [KVLayout(layers=5, first_head=0, heads=8, planes=[6, 6, 4], features=8)],
    ],
)
def test_what_cannot_be_converted_exactly_is_refused(theirs: list[KVLayout]) -> None:
    assert not convertible(theirs, MODEL)
    parts = [(one, np.zeros(one.token_bytes, np.uint8)) for one in theirs]
    with pytest.raises(SegmentError, match=r"is no KV of heads 0 to 7, 4 layers of \[6, 6, 4\] bytes a head") as error:
        converted(parts, MODEL, range(1), 1)
    assert error.value.reason == "layout"
