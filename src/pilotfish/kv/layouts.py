"""Segments of one layout as those of another: where a model's KV heads are split over ranks, each rank has some. Any
other difference is refused. Features have no heads.

theirs   rank 0 [ head 0, 1 ]   rank 1 [ head 2, 3 ]
ours            [ head 0, 1, 2, 3 ]    or [ head 1 ]
"""

from collections.abc import Iterator, Sequence

import numpy as np

from pilotfish.core.prefilling.segments import KVLayout
from pilotfish.errors import SegmentError
from pilotfish.kv.arena import Bytes


def convertible(theirs: Sequence[KVLayout], ours: KVLayout) -> bool:
    """Whether KV of all of `theirs` together has all that `ours` has, bit for bit."""
    if any((one.layers, one.planes, one.features) != (ours.layers, ours.planes, ours.features) for one in theirs):
        return False
    reached = ours.first_head
    for span in sorted((one.span for one in theirs), key=lambda span: span.start):
        if span.start <= reached:
            reached = max(reached, span.stop)
    return reached >= ours.span.stop


def converted(parts: Sequence[tuple[KVLayout, Bytes]], ours: KVLayout, layers: range, tokens: int) -> Bytes:
    """One segment of our layout. SegmentError where the parts lack some of it. [tokens × ours.bytes_of(layers)]"""
    theirs = [layout for layout, _ in parts]
    if theirs == [ours]:
        return parts[0][1]
    if not convertible(theirs, ours):
        raise SegmentError("layout", f"KV of {_described(theirs)} is no KV of {_described([ours])}")
    whole = np.empty(tokens * ours.bytes_of(layers), np.uint8)
    count = len(range(layers.start, min(layers.stop, ours.of_kv.stop)))
    for layout, data in parts:
        first = max(layout.first_head, ours.first_head)
        end = max(min(layout.span.stop, ours.span.stop), first)
        here, there = (slice(first - one.first_head, end - one.first_head) for one in (ours, layout))
        planes = zip(_planes(whole, ours, count, tokens), _planes(data, layout, count, tokens), strict=True)
        for plane, from_plane in planes:
            plane[:, :, here] = from_plane[:, :, there]
        whole[count * tokens * ours.token_bytes :] = data[count * tokens * layout.token_bytes :]
    return whole


def _planes(data: Bytes, layout: KVLayout, layers: int, tokens: int) -> Iterator[Bytes]:
    of_layer, first = tokens * layout.token_bytes, 0
    by_layer = data[: layers * of_layer].reshape(layers, of_layer)
    for size in layout.planes:
        end = first + tokens * layout.heads * size
        yield by_layer[:, first:end].reshape(layers, tokens, layout.heads, size)
        first = end


def _described(layouts: Sequence[KVLayout]) -> str:
    return " and ".join(f"heads {one.first_head} to {one.span.stop - 1}, {one.described}" for one in layouts)
