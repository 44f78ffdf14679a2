"""Segments in an arena, for tests."""

from __future__ import annotations

import numpy as np

from pilotfish.core.segments import SegmentReference
from pilotfish.kv.arena import Arena
from pilotfish.kv.readers import content


def fill(arena: Arena, place: int, seed: int) -> bytes:
    """Write something random into a taken place."""
    buffer = arena.buffer(place)
    buffer[:] = np.random.default_rng(seed).integers(0, 256, len(buffer), np.uint8)
    return bytes(buffer)


def referred(arena: Arena, place: int) -> SegmentReference:
    """To what is in a taken place."""
    buffer = arena.buffer(place)
    return SegmentReference(
        epoch=arena.epoch(place),
        handover=1,
        number=0,
        first=0,
        tokens=1,
        layer=0,
        layers=1,
        place=place,
        size=len(buffer),
        layout=bytes(16),
        content=content(buffer.data),
    )


def put(arena: Arena, size: int, seed: int = 0) -> SegmentReference:
    """A segment of random bytes."""
    place = arena.take(b"somebody", size)
    assert place is not None
    fill(arena, place, seed)
    return referred(arena, place)
