"""Places of an arena: one owner each, and no reference to what was there before is good."""

import threading
from typing import Any

import msgspec
import numpy as np
import pytest
from arenas import fill, referred
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from refusals import refused
from sizes import sized

from pilotfish.core.prefilling.segments import SegmentReference
from pilotfish.errors import EngineError
from pilotfish.kv.arena import Arena

PLACES, SEGMENT_BYTES = 6, 100


class Arenas(RuleBasedStateMachine):
    """Whatever is taken, written and freed, in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(PLACES * SEGMENT_BYTES + 99, SEGMENT_BYTES)
        self.live: dict[int, tuple[bytes, SegmentReference, bytes]] = {}
        self.stale: list[SegmentReference] = []

    def teardown(self) -> None:
        self.arena.close()

    @rule(
        owner=st.sampled_from([b"one", b"two", b"three"]), size=st.integers(1, SEGMENT_BYTES), seed=st.integers(0, 255)
    )
    def take(self, owner: bytes, size: int, seed: int) -> None:
        held = sum(one == owner for one, _, _ in self.live.values())
        place = self.arena.take(owner, size)
        assert (place is None) == (held >= PLACES - len(self.live))
        if place is not None:
            assert place not in self.live and 0 <= place < PLACES
            data = fill(self.arena, place, seed)
            assert len(data) == size
            self.live[place] = owner, referred(self.arena, place), data

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: Any) -> None:
        place = data.draw(st.sampled_from(sorted(self.live)))
        _, reference, _ = self.live.pop(place)
        self.arena.free(place)
        self.stale.append(reference)

    @rule(place=st.integers(0, PLACES - 1))
    def free_what_nobody_has(self, place: int) -> None:
        if place not in self.live:
            assert f"place {place} freed twice" in refused(EngineError, self.arena.free, place)

    @invariant()
    def what_is_there_is_seen(self) -> None:
        for _, reference, data in self.live.values():
            view = self.arena.view(reference)
            assert view is not None and bytes(view) == data and view.readonly
            for size in (reference.size - 1, reference.size + 1):
                assert self.arena.view(msgspec.structs.replace(reference, size=size)) is None

    @invariant()
    def what_is_stale_is_not(self) -> None:
        assert all(self.arena.view(reference) is None for reference in self.stale)

    @invariant()
    def all_places_are_free_or_taken(self) -> None:
        assert len(self.arena._free) == PLACES - len(self.live)


Arenas.TestCase.settings = settings(max_examples=sized(12, 60), stateful_step_count=40)
TestArenas = Arenas.TestCase


@pytest.fixture
def arena() -> Any:
    arena = Arena(PLACES * SEGMENT_BYTES, SEGMENT_BYTES)
    yield arena
    arena.close()


def test_references_that_name_nothing_see_nothing(arena: Arena) -> None:
    place = arena.take(b"one", 10)
    assert place is not None
    reference = referred(arena, place)
    for field, value in (("place", PLACES), ("place", (1 << 31) - 1), ("place", (place + 1) % PLACES), ("epoch", 1)):
        assert arena.view(msgspec.structs.replace(reference, **{field: value})) is None
    arena.close()
    assert arena.view(reference) is None and arena.take(b"one", 10) is None


@pytest.mark.parametrize("size", [0, SEGMENT_BYTES + 1])
def test_a_segment_that_no_place_holds(arena: Arena, size: int) -> None:
    with pytest.raises(EngineError, match=f"segments: {size} bytes; 1 to {SEGMENT_BYTES} fit into a place"):
        arena.take(b"one", size)


def test_memory_without_room_for_a_place() -> None:
    assert "segments: 99 bytes of memory have no room for one of 100" in refused(EngineError, Arena, 99, 100)
    assert "no shared memory of" in refused(EngineError, Arena, 1 << 62, 1 << 60)


def test_threads_never_have_one_place_together() -> None:
    """Each writes its name over the whole of what it took, and finds nothing else there."""
    arena, wrong = Arena(4 * SEGMENT_BYTES, SEGMENT_BYTES), []

    def work(name: int) -> None:
        for _ in range(sized(500, 2000)):
            place = arena.take(bytes([name]), SEGMENT_BYTES)
            if place is not None:
                arena.buffer(place)[:] = name
                wrong.extend(np.flatnonzero(arena.buffer(place) != name))
                arena.free(place)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(arena._free) == 4
    arena.close()
