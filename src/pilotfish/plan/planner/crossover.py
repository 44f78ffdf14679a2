from itertools import count, takewhile

from msgspec import Struct
from msgspec.structs import replace

from pilotfish.plan.planner.acceptance import PairAcceptance
from pilotfish.plan.planner.decoding import plain_step, speculative_step
from pilotfish.plan.planner.deployment import Deployment

#: Halvings in the search for the acceptance that breaks even.
HALVINGS = 30


class PayingRange(Struct, frozen=True, kw_only=True):
    """Sequences of a target, both ends included, with which guesses pay."""

    first: int
    last: int
    gain: float  # the speed over that of plain decoding at `first`


def paying_ranges(deployment: Deployment, context: float, most: int) -> tuple[PayingRange, ...]:
    """From 1 to `most` sequences. A mixture of experts may have two ranges: few rows touch few experts, many touch all
    anyway. Ends are exact for ranges longer than a step of the grid."""
    growing = takewhile(lambda sequences: sequences < most, (int(16 * 1.25**power) for power in count()))
    grid = sorted({*range(1, min(16, most) + 1), *growing, most}) if most else []
    ranges: list[PayingRange] = []
    first: int | None = None
    for before, here in zip([0, *grid], grid, strict=False):
        pays = gain(deployment, here, context) >= 1
        if pays and first is None:
            first = _edge(deployment, context, before, here)
        if not pays and first is not None:
            ranges.append(_range(deployment, context, first, _edge(deployment, context, before, here) - 1))
            first = None
    return tuple(ranges) if first is None else (*ranges, _range(deployment, context, first, most))


def gain(deployment: Deployment, sequences: int, context: float) -> float:
    guessed = speculative_step(deployment, sequences, context)
    return 0.0 if guessed is None else guessed.speed / plain_step(deployment.target, sequences, context).speed


def break_even(deployment: Deployment, sequences: int, context: float) -> PairAcceptance | None:
    """The acceptance, or share of the trees' maximum, at which guesses are as fast as none; None: nowhere."""
    draft = deployment.draft
    if draft is None:
        return None

    def pays(share: float) -> bool:
        changed = replace(draft, acceptance=draft.acceptance.filled(share))
        return gain(replace(deployment, draft=changed), sequences, context) >= 1

    low, high = 0.0, 1.0
    if not pays(high):
        return None
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return draft.acceptance.filled(high)


def _edge(deployment: Deployment, context: float, before: int, here: int) -> int:
    pays = gain(deployment, here, context) >= 1
    while here - before > 1:
        middle = (before + here) // 2
        before, here = (before, middle) if (gain(deployment, middle, context) >= 1) == pays else (middle, here)
    return here


def _range(deployment: Deployment, context: float, first: int, last: int) -> PayingRange:
    return PayingRange(first=first, last=last, gain=gain(deployment, first, context))
