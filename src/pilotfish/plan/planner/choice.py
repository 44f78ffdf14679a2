import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import count, takewhile

from msgspec import Struct
from msgspec.structs import replace

from pilotfish.errors import ParameterError
from pilotfish.plan.planner.acceptance import PairAcceptance
from pilotfish.plan.planner.candidates import deployments, with_prefill
from pilotfish.plan.planner.decoding import plain_step, speculative_step
from pilotfish.plan.planner.deployment import Deployment
from pilotfish.plan.planner.load import LoadedDeployment
from pilotfish.plan.planner.outlook import Outlook, outlook
from pilotfish.plan.planner.situation import Situation

#: Factors on the given acceptance.
FACTORS = (0.8, 0.9, 1.0, 1.1)
#: Digits of scores that are compared: the model cannot tell smaller differences apart.
DIGITS = 3
#: Deployments of each kind that are also tried with prefill workers.
EXTENDED = 8
#: Halvings in the search for the acceptance that breaks even.
HALVINGS = 30

Tried = tuple[Deployment, Outlook | None]
#: A progress bar for `total` deployments; its value is called for each.
Bar = Callable[[int], AbstractContextManager[Callable[[], None]]]


class PayingRange(Struct, frozen=True, kw_only=True):
    """Sequences of a target, both ends included, with which guesses pay."""

    first: int
    last: int
    gain: float  # the speed over that of plain decoding at `first`


class Crossover(Struct, frozen=True, kw_only=True):
    outlook: Outlook  # of the best deployment of its kind
    ranges: tuple[PayingRange, ...]  # of sequences of a target, up to those that it has memory for
    room: int  # for so many
    requests: float | None  # a second, of all its targets, at the end of the last range; None: it pays nowhere


class Sensitivity(Struct, frozen=True, kw_only=True):
    name: str
    acceptance: float  # of a guess, or tokens gained by the first tree
    speed: float  # tokens a second of a user
    tokens: float  # a second, of all
    token_cost: float | None  # USD per million, at the mean price
    serves: bool


class HardwareChoice(Struct, frozen=True, kw_only=True):
    situation: Situation
    chosen: Outlook
    kinds: tuple[Outlook, ...]  # the best of each kind, the chosen one first
    tried: int  # deployments
    crossovers: tuple[Crossover, ...]  # of the best sync and async ones
    speculative: Outlook | None  # what the sensitivity is of: the chosen one, or the best of those with a draft
    sensitivity: tuple[Sensitivity, ...]
    break_even: float | None  # acceptance of `speculative` with which it is as fast as plain steps are there


def choose(situation: Situation, bar: Bar = lambda _: nullcontext(lambda: None)) -> HardwareChoice:
    """ParameterError where nothing serves anybody."""
    found = _outlooks(situation, list(deployments(situation)), bar)
    tried = [*found, *_outlooks(situation, list(_extended(situation, found)), bar)]
    served = [one for _, one in tried if one is not None]
    if not served:
        raise ParameterError("limits", _limits(situation), "limits that a deployment of these devices can keep")
    best: dict[str, Outlook] = {}
    for one in sorted(served, key=lambda one: _score(situation, one)):
        best.setdefault(one.deployment.kind, one)
    kinds = tuple(best.values())
    speculative = next((one for one in kinds if one.deployment.draft is not None), None)
    even = None
    if speculative is not None:
        even = break_even(speculative.deployment, speculative.point.sequences, situation.workload.context)
    return HardwareChoice(
        situation=situation,
        chosen=kinds[0],
        kinds=kinds,
        tried=len(tried),
        crossovers=tuple(_crossovers(situation, kinds)),
        speculative=speculative,
        sensitivity=() if speculative is None else tuple(_sensitivity(situation, speculative)),
        break_even=None if even is None else even.figure,
    )


def _outlooks(situation: Situation, tried: list[Deployment], bar: Bar) -> list[Tried]:
    outlooks: list[Tried] = []
    with bar(len(tried)) as advance:
        for one in tried:
            outlooks.append((one, outlook(situation, one)))
            advance()
    return outlooks


def _extended(situation: Situation, found: list[Tried]) -> Iterable[Deployment]:
    """The best `EXTENDED` of each kind with prefill workers; those that break limits without them come last."""
    counts: Counter[str] = Counter()
    for one, _ in sorted(found, key=lambda pair: (2.0,) if pair[1] is None else _score(situation, pair[1])):
        if counts[one.kind] < EXTENDED and (more := list(with_prefill(situation, one))):
            counts[one.kind] += 1
            yield from more


def _score(situation: Situation, one: Outlook) -> tuple[float, ...]:
    """Least is best: the demand served; then money, or devices without prices, and speed, in the objective's order."""
    if not one.serves:
        return (1.0, -one.capacity.tokens, 0.0)
    million = one.point.tokens * 3600 / 1e6
    cost = one.device_count / million if one.token_cost is None else one.token_cost.mean
    both = [float(f"{value:.{DIGITS}g}") for value in (cost, -one.point.speed)]
    return (0.0, *(both if situation.objective == "cost" else reversed(both)), float(one.device_count))


def _crossovers(situation: Situation, kinds: Iterable[Outlook]) -> Iterable[Crossover]:
    seen: set[str] = set()
    for one in kinds:
        deployment = one.deployment
        if deployment.mode == "off" or deployment.mode in seen:
            continue
        seen.add(deployment.mode)
        loaded = LoadedDeployment(deployment, situation.workload, situation.limits)
        ranges = paying_ranges(deployment, situation.workload.context, loaded.room)
        requests = loaded.at(ranges[-1].last).requests if ranges else None
        yield Crossover(outlook=one, ranges=ranges, room=loaded.room, requests=requests)


def _sensitivity(situation: Situation, one: Outlook) -> Iterable[Sensitivity]:
    draft = one.deployment.draft
    assert draft is not None
    given = draft.acceptance
    named = [(f"{factor - 1:+.0%}" if factor != 1 else "as given", given.scaled(factor)) for factor in FACTORS]
    others = sorted(set(given.range or ()) - {given.rate})
    named += [("the range's end", replace(given, rate=rate)) for rate in others]
    for name, acceptance in named:
        changed = outlook(situation, replace(one.deployment, draft=replace(draft, acceptance=acceptance)))
        if changed is not None:
            cost = changed.token_cost
            yield Sensitivity(
                name=name,
                acceptance=acceptance.figure,
                speed=changed.point.speed,
                tokens=changed.point.tokens,
                token_cost=None if cost is None else cost.mean,
                serves=changed.serves,
            )


def _limits(situation: Situation) -> str:
    limits = situation.limits
    named = ((name, getattr(limits, name)) for name in limits.__struct_fields__)
    given = ", ".join(f"{name} {value:g}" for name, value in named if value is not None)
    return given or f"requests of {situation.workload.longest} tokens"


def shortfall(choice: HardwareChoice) -> float:
    demand, chosen = choice.situation.workload, choice.chosen
    if chosen.serves:
        return 0.0
    slots = chosen.capacity.sequences * chosen.deployment.replicas
    served = slots / demand.users if demand.users is not None else chosen.capacity.requests / (demand.rate or math.inf)
    return max(0.0, 1 - served)


# -- where guesses pay


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
    assert draft is not None  # or nothing would guess

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
    return bisect_left(range(here), True, before + 1, key=lambda n: (gain(deployment, n, context) >= 1) == pays)


def _range(deployment: Deployment, context: float, first: int, last: int) -> PayingRange:
    return PayingRange(first=first, last=last, gain=gain(deployment, first, context))
