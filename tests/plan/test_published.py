"""The predictions that are committed are those of the model."""

from __future__ import annotations

import json
from pathlib import Path

from pilotfish.plan.published import predictions

#: Made by `pilotfish plan predictions`.
COMMITTED = Path(__file__).with_name("predictions.json")


def test_the_predictions_are_those_of_the_model() -> None:
    assert json.loads(COMMITTED.read_text()) == predictions()
