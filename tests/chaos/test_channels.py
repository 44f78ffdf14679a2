"""A connection that loses, repeats, delays, reorders and damages frames, both ways."""

from __future__ import annotations

from pathlib import Path

import pytest
from bad_channel import BadChannel
from loopback import Loopback
from sizes import sized
from support import assert_idle, run
from workers import PARAMS, PROMPTS, engine_over, eventually, threaded_pool

from pilotfish.core.drafting import draft_sessions, pools

FAULTS = {
    "dropped": {"dropped": 0.1},
    "repeated": {"repeated": 0.3},
    "delayed": {"delayed": 1.0},
    "flipped": {"flipped": 0.1},
    "all": {"dropped": 0.03, "repeated": 0.05, "delayed": 0.1, "flipped": 0.03},
}


@pytest.mark.parametrize("kind", sized(["all"], list(FAULTS)))
def test_a_bad_network_changes_no_output(
    kind: str, llama: Path, draft: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "PAUSE", 0.2)
    near, far = Loopback.pair(b"target")
    ends = BadChannel(near, 1, FAULTS[kind], 0.2), BadChannel(far, 2, FAULTS[kind], 0.2)
    with threaded_pool(draft, ends[1]) as worker, engine_over(llama, ends[0]) as engine:
        drafter = engine.drafter
        assert run(engine, PROMPTS[:50], PARAMS[:50]) == expected[:50]
        while (
            worker.machine.counts.levels < 20 or drafter.machine.counts.trees < 20
        ):  # a target this fast may be through before
            assert run(engine, PROMPTS[:10], PARAMS[:10]) == expected[:10]
        for fault in FAULTS[kind]:
            assert ends[0].counts[fault] > 0 and ends[1].counts[fault] > 0
        assert engine.worker.drafter.drafter is drafter  # it has never raised
        for end in ends:
            end.bad = False
        trees = drafter.machine.counts.trees
        while drafter.machine.counts.trees < trees + 100:
            assert run(engine, PROMPTS[:10], PARAMS[:10]) == expected[:10]
        assert_idle(engine)
        monkeypatch.setattr(draft_sessions, "FORGOTTEN", 0.0)  # those whose Close was lost
        eventually(lambda: len(worker.machine.table) == 0)
    worker.machine.table.check()
    assert worker.machine.table.pool.num_available == worker.machine.table.pool.capacity
