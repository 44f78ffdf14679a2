"""Imports no torch."""

import logging
from dataclasses import dataclass
from itertools import pairwise

from pilotfish.config.fields import parse_cores
from pilotfish.errors import ParameterError

logger = logging.getLogger(__name__)

CORES_PER_DRAFT_CORE = 8  # by default a draft worker has one core of so many, and at least one


@dataclass(frozen=True)
class Placement:
    """Core numbers; an empty set: wherever the system likes."""

    target: frozenset[int]
    workers: tuple[frozenset[int], ...]

    @property
    def taken(self) -> frozenset[int]:
        return frozenset().union(*self.workers) - self.target


def split_cores(available: frozenset[int], target: str, draft: str, workers: int) -> Placement:
    """`target` and `draft` are as in "0,2-3". By default each draft worker has an eighth of the `available` cores, at
    least one, together at most half, the last ones; the target has all others. If no core is left for one of the two,
    they share, with a warning. ParameterError for overlapping or forbidden sets."""
    own, drafts = parse_cores(target, "cores"), parse_cores(draft, "draft_cores")
    if own & drafts:
        raise ParameterError("draft_cores", draft, f"other cores than the target's, {target}")
    most = min(workers * max(1, len(available) // CORES_PER_DRAFT_CORE), len(available) // 2)
    drafts = drafts or _last(available - own, most)
    return _placement(available, own, drafts, workers, "draft")


def split_for_prefill(
    available: frozenset[int], target: str, prefill: str, workers: int, drafts: frozenset[int] = frozenset()
) -> Placement:
    """By default prefill workers have all cores that a target with cores of its own leaves, else the last half.
    `available` excludes draft workers' cores; if none is left they share the `drafts`', not the target's."""
    own, theirs = parse_cores(target, "cores"), parse_cores(prefill, "prefill_cores")
    if own & theirs:
        raise ParameterError("prefill_cores", prefill, f"other cores than the target's, {target}")
    left = available - own
    theirs = theirs or _last(left, len(left) if own else len(left) // 2)
    if not theirs and drafts:
        logger.warning("draft and prefill share cores %s: they will slow each other down", sorted(drafts))
        theirs = drafts
    return _placement(available, own, theirs, workers, "prefill")


def _placement(
    available: frozenset[int], own: frozenset[int], theirs: frozenset[int], workers: int, role: str
) -> Placement:
    own = own or available - theirs
    if available and not (own and theirs):
        own = theirs = own or theirs
        logger.warning("target and %s share cores %s: they will slow each other down", role, sorted(own))
    return Placement(own, equal_parts(theirs, workers))


def _last(cores: frozenset[int], count: int) -> frozenset[int]:
    return frozenset(sorted(cores)[max(0, len(cores) - count) :])


def equal_parts(cores: frozenset[int], workers: int) -> tuple[frozenset[int], ...]:
    """Parts of neighbours; of fewer cores than workers, one each that several share."""
    ordered = sorted(cores)
    starts = [i * len(ordered) // workers for i in range(workers + 1)]
    return tuple(frozenset(ordered[start : max(start + 1, end)]) for start, end in pairwise(starts))
