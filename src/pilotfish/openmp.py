"""OpenMP's threads spin by default: if another process takes one thread's core, all others burn theirs meanwhile. With
one busy neighbour a forward of a 344 M model took ten times as long; sleeping threads cost a few microseconds a
wake-up. Torch's own operations run on these threads, our kernels on others (`model/cpu/kernels/team.h`)."""

import logging
import os
import sys

logger = logging.getLogger(__name__)

POLICY = "OMP_WAIT_POLICY"


def wait_passively() -> None:
    """Have OpenMP's threads sleep while they wait, here and in child processes, unless the environment is set. OpenMP
    reads this when torch is loaded: later it changes nothing here."""
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
