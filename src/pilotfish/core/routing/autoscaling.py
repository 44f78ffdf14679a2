"""How many targets there should be: as many as all their work fills to `GOAL`."""

import math
from collections.abc import Collection

#: Shares of a target's capacity: the goal, and what fewer targets must stay below before one is taken away, so that no
#: number of targets is both too many and too few.
GOAL, CALM = 0.8, 0.6
_EPSILON = 1e-9  # rounding error of a float


def targets_wanted(demands: Collection[float], now: int) -> int:
    """`demands`: work over capacity of the targets that have reported; `now`: all targets, starting ones included."""
    work = sum(demands)
    enough = max(1, math.ceil(work / GOAL - _EPSILON))
    if enough >= now:
        return enough
    calm = max(1, math.ceil(work / CALM - _EPSILON))
    return min(now, calm)
