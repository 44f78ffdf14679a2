"""Costs of a machine, fitted to what was seen; files of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.errors import ParameterError
from pilotfish.plan.simulation.calibration import MachineCalibration, fitted, read_calibration
from pilotfish.plan.simulation.setup import HostCosts

COSTS = st.lists(st.floats(0.001, 1.0), min_size=3, max_size=3)


@given(COSTS)
def test_costs_are_found_again(costs: list[float]) -> None:
    counts = [[1, sequences, nodes] for sequences in (1, 2, 4) for nodes in (0, 8, 30)]
    seconds = (np.array(counts) @ np.array(costs)).tolist()
    assert fitted(counts, seconds) == pytest.approx(costs, rel=1e-6)


def test_stragglers_do_not_count_and_no_cost_is_negative() -> None:
    counts = [[1, rows] for rows in (1, 5) for _ in range(9)]
    assert fitted(counts, [*[2.0] * 8, 90.0, *[1.0] * 8, 70.0]) == pytest.approx([1.5, 0.0])


def test_a_file_of_costs_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    written = MachineCalibration(
        processor="p", pair="pycode", target="1:1ms/8:2ms", draft="1ms", host=HostCosts(step=0.001)
    )
    path.write_bytes(msgspec.json.encode(written))
    assert read_calibration(path) == written
    path.write_bytes(msgspec.json.encode(written).replace(b"step", b"stop"))
    garbage = tmp_path / "garbage.json"
    garbage.write_bytes(b'{"processor": "\xff"}')
    for wrong in (path, garbage, tmp_path / "missing.json"):
        with pytest.raises(ParameterError, match=r"machine: .*plan calibrate"):
            read_calibration(wrong)
