"""Drafts here learn nothing of their chances (tests/core/test_child_calibration.py does): they are the model's own."""

from pathlib import Path

import pytest
from rig import HELLO, Rig

from pilotfish.core.trees.child_calibration import ChildCalibration


@pytest.fixture(autouse=True)
def nothing_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChildCalibration, "observe", lambda *_: None)


@pytest.fixture
def rig(llama: Path) -> Rig:
    """Greeted by a target of that name."""
    rig = Rig(llama)
    rig.say(b"target", HELLO)
    return rig
