"""The prefill worker: what it hands over is what a direct forward writes, whatever else runs, ends or fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefill_rig import Client, PrefillRig, prompt

from pilotfish.core.prefill_messages import OrderDone


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 300])
def test_what_is_handed_over_is_what_a_forward_writes(llama: Path, length: int) -> None:
    rig = PrefillRig(llama)
    target = Client(rig)
    target.order(1, prompt(length))
    rig.rest()
    taken = target.take()
    target.assert_whole(1)
    (done,) = rig.heard(target.peer, OrderDone)
    assert (done.handover, done.segments, done.cached) == (1, taken, 0)
    rig.assert_idle()
