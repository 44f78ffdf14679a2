"""Segments of one layout as those of another: where a model's KV heads are split over ranks, each rank has some.

theirs   rank 0 [ head 0, 1 ]   rank 1 [ head 2, 3 ]          whatever else differs is refused: the bytes of a head
ours            [ head 0, 1, 2, 3 ]    or [ head 1 ]          are what its model computed, and stay that
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pilotfish.core.segments import KVLayout
from pilotfish.errors import SegmentError
from pilotfish.kv.arena import Bytes


def convertible(theirs: Sequence[KVLayout], ours: KVLayout) -> bool:
    """Whether KV of all of `theirs` together has all that `ours` has, bit for bit."""
    if any((one.layers, one.planes) != (ours.layers, ours.planes) for one in theirs):
        return False
    reached = ours.first_head
    for span in sorted((one.span for one in theirs), key=lambda span: span.start):
        if span.start <= reached:
            reached = max(reached, span.stop)
    return reached >= ours.span.stop


def converted(parts: Sequence[tuple[KVLayout, Bytes]], ours: KVLayout, layers: int, tokens: int) -> Bytes:
    """Segments of the same layers and tokens, each of a layout of its own, as one of ours. SegmentError where they have
    not all that it needs. [layers × tokens × ours.token_bytes]"""
    theirs = [layout for layout, _ in parts]
    if theirs == [ours]:
        return parts[0][1]
    if not convertible(theirs, ours):
        raise SegmentError("layout", f"KV of {_described(theirs)} is no KV of {_described([ours])}")
    whole = np.empty(layers * tokens * ours.token_bytes, np.uint8)
    for layout, data in parts:
        first = max(layout.first_head, ours.first_head)
        end = max(min(layout.span.stop, ours.span.stop), first)
        here, there = (slice(first - one.first_head, end - one.first_head) for one in (ours, layout))
        planes = zip(_planes(whole, ours, layers, tokens), _planes(data, layout, layers, tokens), strict=True)
        for plane, from_plane in planes:
            plane[:, :, here] = from_plane[:, :, there]
    return whole


def _planes(data: Bytes, layout: KVLayout, layers: int, tokens: int) -> Iterator[Bytes]:
    """Each plane of a segment, of all its layers. [layers, tokens, heads, bytes]"""
    by_layer, first = data.reshape(layers, -1), 0
    for size in layout.planes:
        end = first + tokens * layout.heads * size
        yield by_layer[:, first:end].reshape(layers, tokens, layout.heads, size)
        first = end


def _described(layouts: Sequence[KVLayout]) -> str:
    return " and ".join(
        f"heads {one.first_head} to {one.span.stop - 1} of {one.planes} bytes ({one.layers} layers)" for one in layouts
    )
