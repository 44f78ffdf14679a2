"""Where speculation stops paying."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def crossover(points: Sequence[tuple[float, float]]) -> float | None:
    """The load at which a speed-up, of (load, speed-up) in order of loads, falls below 1: interpolated on the logarithm
    of the load, between the two measured ones of the first fall. None: it does not within the range."""
    for (load, above), (next_load, below) in pairwise(points):
        if above >= 1 > below:
            share = (above - 1) / (above - below)
            return math.exp(math.log(load) + share * math.log(next_load / load))
    return None


def crossover_text(points: Sequence[tuple[float, float]]) -> str:
    """In words."""
    if (found := crossover(points)) is not None:
        return f"stops paying at about {found:.3g}"
    low, high = points[0][0], points[-1][0]
    where = f"at {low:g}" if low == high else f"from {low:g} to {high:g}"
    if all(speedup >= 1 for _, speedup in points):
        return f"pays {where}; the crossover is not within the range"
    if all(speedup < 1 for _, speedup in points):
        return f"does not pay {where}; the crossover is not within the range"
    return f"pays at {high:g}, but not at {low:g}; it does not stop paying within the range"
