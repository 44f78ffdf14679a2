"""How a chunk is split into segments."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from pilotfish.core.prefilling.segments import LEAST_SEGMENT, KVLayout
from pilotfish.workers.export import split


@given(
    st.builds(
        KVLayout,
        layers=st.integers(2, 40),
        first_head=st.just(0),
        heads=st.integers(1, 16),
        planes=st.lists(st.integers(4, 256), min_size=2, max_size=4),
        features=st.sampled_from([0, 8, 16384]),
    ),
    st.integers(1, 3000),
    st.integers(15, 20).map(lambda bits: 1 << bits),
)
@example(KVLayout(1, 0, 5, [256, 256]), 819, 1 << 20)  # 409.6 tokens fit
@example(KVLayout(3, 0, 1, [4, 157]), 272, 1 << 17)  # two of three layers fit
def test_parts_cover_a_chunk_once_and_fit_into_places(layout: KVLayout, tokens: int, segment_bytes: int) -> None:
    parts = list(split(layout, tokens, segment_bytes))
    covered = [(layer, token) for part in parts for layer in part.layers for token in part.tokens]
    assert covered == sorted(covered, key=lambda one: one[0]) and len(set(covered)) == len(covered)
    assert len(covered) == layout.layers * tokens
    assert max(len(part.tokens) * layout.bytes_of(part.layers) for part in parts) <= segment_bytes
    of_kv = [part for part in parts if part.layers.stop <= layout.of_kv.stop]
    sizes = [len(part.layers) * len(part.tokens) * layout.token_bytes for part in of_kv]
    assert len(of_kv) == 1 or min(sizes) >= min(LEAST_SEGMENT, segment_bytes) / 3
    features = [part.layers for part in parts if part.layers.stop > layout.of_kv.stop]
    assert all(layers == range(layout.layers - 1, layout.layers) for layers in features)
