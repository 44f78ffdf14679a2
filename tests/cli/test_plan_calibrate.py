"""What a machine takes beside its forwards, from records of steps and levels."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pilotfish.cli.bench.contestants import Run
from pilotfish.cli.bench.modes.levels import Level
from pilotfish.cli.plan.calibrate import SYNC, Measured, host_costs
from pilotfish.config.engine import EngineConfig
from pilotfish.engine.pairs import resolve_pair
from pilotfish.workers.records import StepRecord

STEP, SEQUENCE, NODE, LEVEL, WAITED = 0.0005, 0.00004, 0.00001, 0.0003, 0.0002
TARGET, DRAFT = 0.020, 0.004


def measured(name: str, sequences: int, nodes: int, began: float) -> Measured:
    drafting = SYNC[0] * (DRAFT + WAITED) if name == "sync" else 0.0
    period = TARGET + drafting + STEP + SEQUENCE * sequences + NODE * nodes
    steps = []
    for before, _ in pairwise(began + period * i for i in range(8)):
        moments = (before, before, before, before + drafting, before + drafting)
        ended = before + period
        counts = {"rows": sequences + nodes, "nodes": nodes, "depth": 3, "offered": nodes, "accepted": 1}
        steps.append(
            StepRecord(*moments, ended, ended, ended, ended, sequences=sequences, committed=2, hits=0, **counts)
        )
    return Measured(name, Run(1.0, [], steps=steps), sequences)


def test_costs_are_those_that_the_records_have() -> None:
    models = resolve_pair("pycode")
    pace = "target=1:20ms/4096:20ms,draft=1:4ms/4096:4ms"
    config = EngineConfig(target=models.target, draft=models.draft, mode="async", drafter="lm", pace=pace)
    runs = [
        measured(name, sequences, nodes * sequences, 10.0 * place)
        for place, (name, sequences, nodes) in enumerate(
            [("off", 1, 0), ("sync", 1, 12), ("async", 1, 16), ("off", 4, 0), ("sync", 4, 12), ("async", 4, 16)]
        )
    ]
    levels = [Level(at, at + DRAFT, 32, 0) for at in (20.0 + i * (DRAFT + LEVEL) for i in range(9))]
    found = host_costs(config, runs, levels)
    assert (found.step, found.sequence, found.node) == pytest.approx((STEP, SEQUENCE, NODE), rel=1e-3)
    assert found.level + 32 * found.leaf == pytest.approx(LEVEL)
    assert found.waited == pytest.approx(WAITED)
