from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from pilotfish.config.hardware.pace import Pace
from pilotfish.config.hardware.tables import PILOTFISH
from pilotfish.core.trees.tree import Floats
from pilotfish.errors import ParameterError
from pilotfish.plan.simulation.setup import HostCosts


class MachineCalibration(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    processor: str
    pair: str
    target: str  # a pace: milliseconds of its forwards by rows, on this machine
    draft: str
    host: HostCosts


def read_calibration(path: Path) -> MachineCalibration:
    """ParameterError for another file."""
    try:
        read = msgspec.json.decode(path.read_bytes(), type=MachineCalibration)
        Pace.parse(read.target), Pace.parse(read.draft)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ParameterError("machine", str(path), f"a file of `pilotfish plan calibrate`: {error}") from None
    return read


def host_of(machine: Path | None) -> HostCosts:
    """Without a file of `pilotfish plan calibrate`, the cost model's assumptions on this project's loops."""
    if machine is not None:
        return read_calibration(machine).host
    level = PILOTFISH.level.value
    return HostCosts(step=PILOTFISH.step.value, level=level, waited=level)


def fitted(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Non-negative seconds [k] of counts [n, k]: least squares over medians of equal counts. `seconds`: [n]."""
    groups: dict[tuple[float, ...], list[float]] = {}
    for row, value in zip(counts, seconds, strict=True):
        groups.setdefault(tuple(row), []).append(value)
    table = np.array(list(groups), np.float64)
    medians = np.array([float(np.median(values)) for values in groups.values()])
    weights = np.sqrt([len(values) for values in groups.values()])
    costs: list[float] = _positive(table * weights[:, None], medians * weights).tolist()
    return costs


def _positive(table: Floats, values: Floats) -> Floats:
    kept = list(range(table.shape[1]))
    while True:
        costs = np.zeros(table.shape[1])
        costs[kept] = np.linalg.lstsq(table[:, kept], values, rcond=None)[0]
        kept = [column for column in kept if costs[column] > 0]
        if not (costs < 0).any():
            return costs
