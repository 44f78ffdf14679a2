"""Which cores the target and each draft worker run on."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import pairwise

from pilotfish.config import parse_cores
from pilotfish.errors import ParameterError

logger = logging.getLogger(__name__)

#: By default a draft worker has one core of so many, and at least one.
CORES_PER_DRAFT_CORE = 8


@dataclass(frozen=True)
class Placement:
    """Sets of core numbers; an empty one: wherever the system likes."""

    target: frozenset[int]
    drafts: tuple[frozenset[int], ...]  # by worker


def split_cores(available: frozenset[int], target: str, draft: str, workers: int) -> Placement:
    """Cores of the target and of `workers` draft workers, 1 or more. `target` and `draft`, as in "0,2-3", say which; ""
    leaves it to the rule: each draft worker has an eighth of the `available` cores, at least one, together at most
    half, the last ones; the target has all others. Where no core is left for one of the two, it shares the other's,
    with a warning. ParameterError for sets that overlap or that this process may not use.
    """
    own, drafts = parse_cores(target, "cores"), parse_cores(draft, "draft_cores")
    if own & drafts:
        raise ParameterError("draft_cores", draft, f"other cores than the target's, {target}")
    drafts = drafts or _last(available - own, _draft_cores(len(available), workers))
    own = own or available - drafts
    if available and not (own and drafts):
        own = drafts = own or drafts
        logger.warning("target and draft share cores %s: they will slow each other down", sorted(own))
    return Placement(own, _divided(drafts, workers))


def _draft_cores(available: int, workers: int) -> int:
    return min(workers * max(1, available // CORES_PER_DRAFT_CORE), available // 2)


def _last(cores: frozenset[int], count: int) -> frozenset[int]:
    return frozenset(sorted(cores)[max(0, len(cores) - count) :])


def _divided(cores: frozenset[int], workers: int) -> tuple[frozenset[int], ...]:
    """Equal parts of neighbours; of fewer cores than workers, one each that several share."""
    ordered = sorted(cores)
    starts = [i * len(ordered) // workers for i in range(workers + 1)]
    return tuple(frozenset(ordered[start : max(start + 1, end)]) for start, end in pairwise(starts))
