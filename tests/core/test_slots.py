"""A slot is free or live, never both, never neither; live as long as it has an owner."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.core.cache.slots import SlotPool
from pilotfish.errors import EngineError

CAPACITY = 12


def test_what_a_pool_cannot_do_is_refused_and_changes_nothing() -> None:
    pool = SlotPool(3)
    slots = pool.allocate(2)
    with pytest.raises(EngineError, match="2 asked for, 1 of 3 free"):
        pool.allocate(2)
    with pytest.raises(EngineError, match="released twice"):
        pool.release([slots[0], slots[0]])
    pool.check(slots)
    pool.release(slots)
    with pytest.raises(EngineError, match="released twice"):
        pool.release(slots)
    with pytest.raises(EngineError, match="a free slot cannot be shared"):
        pool.share(slots)
    pool.check([])


@pytest.mark.parametrize("live", [[], [0], [0, 1, 2], [0, 0]])
def test_check_finds_lost_and_shared_slots(live: list[int]) -> None:
    pool = SlotPool(4)
    assert sorted(pool.allocate(2)) == [0, 1]
    with pytest.raises(EngineError, match="slots"):
        pool.check(live)


@given(steps=st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 6)), max_size=60))
def test_a_slot_is_free_when_its_last_owner_gave_it_back(steps: list[tuple[str, int]]) -> None:
    pool, held = SlotPool(CAPACITY), list[list[int]]()  # what each owner holds
    for action, number in steps:
        if action == "allocate" and number <= pool.num_free:
            held.append(pool.allocate(number).tolist())
            assert not set(held[-1]) & {slot for owned in held[:-1] for slot in owned}
        elif action == "share" and held:
            held.append(held[number % len(held)][:])
            pool.share(np.array(held[-1], np.int32))
        elif action == "release" and held:
            pool.release(held.pop(number % len(held)))
        live = [slot for owned in held for slot in owned]
        assert pool.num_free == CAPACITY - len(set(live))
        pool.check(live)
