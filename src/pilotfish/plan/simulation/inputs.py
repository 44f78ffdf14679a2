"""What a command line says of a simulation: devices, what their host takes, how a draft's guesses are met."""

from __future__ import annotations

from pathlib import Path

from pilotfish.config.hardware.engines import PILOTFISH
from pilotfish.config.hardware.pace import Pace
from pilotfish.config.hardware.placement import place
from pilotfish.errors import ParameterError
from pilotfish.plan.simulation.acceptance import AcceptanceTrace, drawn_acceptance, read_acceptance
from pilotfish.plan.simulation.calibration import read_calibration
from pilotfish.plan.simulation.models import Cost
from pilotfish.plan.simulation.setup import HostCosts

#: Traces in this package, by name.
BUNDLED = {"pycode": Path(__file__).with_name("pycode.jsonl.gz")}
_COSTS = "model@device as in llama-3.1-70b@h200x4, or times as in 10.4ms or, rows ascending, 1:10.4ms/256:20ms"


def cost_of(field: str, text: str) -> Cost:
    """Of a model on devices by the cost model, or by a pace. ParameterError naming `field`."""
    if "@" in text:
        return place(text, field=field).seconds
    try:
        pace = Pace.parse(text)
    except ParameterError:
        raise ParameterError(field, text, _COSTS) from None
    return lambda load: pace.seconds(load.rows)


def trace_of(trace: str, acceptance: float | None) -> AcceptanceTrace:
    """The bundled one of that name, or that file's; with an `acceptance` one is drawn instead."""
    if acceptance is None:
        return read_acceptance(BUNDLED.get(trace, Path(trace)))
    if not 0 < acceptance < 1:
        raise ParameterError("acceptance", acceptance, "a number between 0 and 1")
    return drawn_acceptance(acceptance)


def host_of(machine: Path | None) -> HostCosts:
    """That of a file of `pilotfish plan calibrate`; without one what the cost model assumes of this project's own
    loops."""
    if machine is not None:
        return read_calibration(machine).host
    level = PILOTFISH.level.value
    return HostCosts(step=PILOTFISH.step.value, level=level, waited=level)
