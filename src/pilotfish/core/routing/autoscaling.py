"""How many targets there should be: as many as the work of all of them fills to `GOAL`."""

from __future__ import annotations

import math
from collections.abc import Collection

#: Of a target's capacity: what it is filled to, and what fewer targets must stay below before one is taken away, so
#: that no number of targets is both too many and too few.
GOAL, CALM = 0.8, 0.6
#: What is left over in a float.
_EPSILON = 1e-9


def demand(requests: int, max_requests: int, live_tokens: int, kv_slots: int) -> float:
    """A target's work over its capacity: of requests, waiting ones included, or of KV, whichever is more. Above 1
    requests wait."""
    return max(requests / max_requests, live_tokens / kv_slots)


def targets_wanted(demands: Collection[float], now: int) -> int:
    """`demands` of those that have told theirs; `now`: how many targets there are, those included that start."""
    work = sum(demands)
    enough = max(1, math.ceil(work / GOAL - _EPSILON))
    if enough >= now:
        return enough
    calm = max(1, math.ceil(work / CALM - _EPSILON))
    return min(now, calm)
