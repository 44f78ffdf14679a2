"""How OpenMP's threads wait for each other.

OpenMP's threads spin by default: a thread that finds its core taken by another process lets all others burn theirs
until it has it back. With one busy neighbour a forward of a 344 M model then took ten times as long; threads that
sleep cost a few microseconds each time they are woken. Torch's own operations run on these threads; our kernels have
their own (`model/cpu/kernels/team.h`).
"""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger(__name__)

POLICY = "OMP_WAIT_POLICY"


def wait_passively() -> None:
    """Have OpenMP's threads sleep while they wait, in this process and those that it starts, unless the environment
    says how. OpenMP reads this when torch is loaded: later it changes nothing here."""
    global _came_late
    _came_late = "torch" in sys.modules and POLICY not in os.environ
    os.environ.setdefault(POLICY, "passive")


def warn_of_spinning() -> None:
    """Warn, once, if torch was loaded before `wait_passively`."""
    global _came_late
    if _came_late:
        logger.warning(
            "torch was imported before pilotfish, so its threads spin while they wait: with a busy neighbour on a core "
            "steps take up to ten times as long; import pilotfish first, or set %s=passive",
            POLICY,
        )
    _came_late = False


_came_late = False
