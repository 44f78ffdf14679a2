"""Drafts here learn nothing of their chances (tests/core/test_child_calibration.py does): they are the model's own."""

import pytest

from pilotfish.core.trees.child_calibration import ChildCalibration


@pytest.fixture(autouse=True)
def nothing_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChildCalibration, "observe", lambda *_: None)
