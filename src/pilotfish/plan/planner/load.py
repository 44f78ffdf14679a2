"""A target with `n` decoding sequences takes steps of `best_step`, and computes a new prompt for every request that
ends. It completes

    rate(n) = 1 / (output · step / (n · tokens of a step) + prompt)        requests a second
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property

from msgspec import Struct
from msgspec.structs import replace

from pilotfish.config.hardware.cost import ForwardLoad, PlacedModel
from pilotfish.plan.planner.decoding import DecodingStep, best_step
from pilotfish.plan.planner.demand import Demand, LoadLimits
from pilotfish.plan.planner.deployment import Deployment, PrefillPlacement

#: Most sequences of a target.
MOST_SEQUENCES = 1024
#: Most of the time of prefill workers and drafts that prompts may take: beyond it queues grow without end.
MOST_BUSY = 0.9
#: Rows of a forward of prompts alone.
CHUNK = 2048
#: Share of a transfer of KV between prefill workers and targets that forwards do not hide
#: (docs/benchmarks.md, What of a transfer is hidden).
EXPOSED = 0.1


class LoadPoint(Struct, frozen=True, kw_only=True):
    """Tokens are of outputs."""

    sequences: int  # that a target decodes at once
    requests: float  # a second, of all targets
    tokens: float  # a second, of all users
    speed: float  # tokens a second of a user, prompts of others between them
    ttft: float  # seconds, in the mean
    step: DecodingStep
    shares: Mapping[str, float]  # of a target's time, by what it goes to
    utilisation: Mapping[str, float]  # of target, draft and prefill devices

    @property
    def tpot(self) -> float:
        return 1 / self.speed

    @property
    def binds(self) -> str:
        return max(self.shares, key=lambda name: self.shares[name])


class LoadedDeployment:
    def __init__(self, deployment: Deployment, demand: Demand, limits: LoadLimits) -> None:
        self.deployment, self.demand, self.limits = deployment, demand, limits
        self.at = cache(self._point)  # with so many sequences

    @cached_property
    def room(self) -> int:
        """Sequences that fit into a target's memory; 0 where the longest request does not."""
        tokens = min(self.deployment.kv_tokens, self._draft_tokens)
        return 0 if tokens < self.demand.longest else int(min(tokens / self.demand.context, MOST_SEQUENCES))

    @property
    def _draft_tokens(self) -> float:
        draft = self.deployment.draft
        if draft is None or draft.resident:
            return math.inf
        return draft.workers / self.deployment.replicas * draft.placed.kv_room / draft.placed.kv_bytes

    @cached_property
    def most(self) -> int:
        return last(self.room, lambda n: not self.broken(self.at(n)))

    @cached_property
    def stops(self) -> str:
        if self.most < self.room:
            return ", ".join(self.broken(self.at(self.most + 1)))
        if self.room == MOST_SEQUENCES:
            return "the most sequences tried"
        return "memory of draft devices" if self._draft_tokens < self.deployment.kv_tokens else "memory capacity"

    def broken(self, point: LoadPoint) -> list[str]:
        limits = (("TPOT", point.tpot, self.limits.tpot), ("TTFT", point.ttft, self.limits.ttft))
        over = [f"{name} limit" for name, seconds, most in limits if most is not None and seconds > most]
        return over + [f"{name} devices" for name in ("prefill", "draft") if point.utilisation.get(name, 0) > MOST_BUSY]

    def served(self) -> LoadPoint | None:
        """None where memory, a limit or speed stops short of the demand."""
        sequences = self.needed
        return None if sequences is None or sequences > self.most else self._scaled(self.at(sequences))

    @cached_property
    def needed(self) -> int | None:
        if self.demand.users is not None:
            sequences = math.ceil(self.demand.users / self.deployment.replicas)
            return sequences if sequences <= self.room else None
        rate = self.demand.rate or 0.0
        below = last(self.room, lambda n: self.at(n).requests < rate)
        return below + 1 if below < self.room else None

    def _scaled(self, point: LoadPoint) -> LoadPoint:
        """At the rate asked for, which may be less than the sequences' own, or for users that are no multiple of
        targets. Devices idle for the rest of the time."""
        users, rate = self.demand.users, self.demand.rate
        slots = point.sequences * self.deployment.replicas
        share = min(1.0, users / slots if users is not None else (rate or 0.0) / point.requests)
        return replace(
            point,
            requests=point.requests * share,
            tokens=point.tokens * share,
            utilisation={name: used * share for name, used in point.utilisation.items()},
        )

    def _point(self, sequences: int) -> LoadPoint:
        deployment, demand = self.deployment, self.demand
        step, prompts = best_step(deployment, sequences, demand.context), prompts_beside(deployment, demand, sequences)
        decoding = demand.output / (sequences * step.speed)  # seconds of a target for each request
        rate = 1 / (decoding + prompts.busy)
        shares = {name: seconds / step.seconds * rate * decoding for name, seconds in step.parts.items()}
        return LoadPoint(
            sequences=sequences,
            requests=rate * deployment.replicas,
            tokens=rate * deployment.replicas * demand.output,
            speed=rate * demand.output / sequences,
            ttft=self._ttft(rate, sequences, step),
            step=step,
            shares={**shares, **({"prompts": rate * prompts.busy} if prompts.busy else {})},
            utilisation=self._utilisation(rate, step, decoding),
        )

    def _ttft(self, rate: float, sequences: int, step: DecodingStep) -> float:
        """A prompt waits for earlier ones and for the step that it comes in; its chunks ride on steps."""
        if (prefill := self.deployment.prefill) is None:
            load = prompts_beside(self.deployment, self.demand, sequences)
            return wait_seconds(rate, load) + load.busy + (0.5 + load.chunks) * step.seconds
        apart, arrivals = prompts_apart(prefill, self.demand), rate * self.deployment.replicas / prefill.workers
        computed = wait_seconds(arrivals, apart) + apart.busy + hand_over_seconds(self.deployment, self.demand)
        return computed + 1.5 * step.seconds

    def _utilisation(self, rate: float, step: DecodingStep, decoding: float) -> dict[str, float]:
        deployment, demand, all_of_them = self.deployment, self.demand, rate * self.deployment.replicas
        used = {"target": 1.0}
        if (draft := deployment.draft) is not None and not draft.resident:
            alone = (prompt_time(draft.placed, kind.prompt, demand.shared).alone for kind in demand.requests)
            reading = all_of_them * demand.mean(alone) / draft.workers
            used["draft"] = reading
            used["draft at work"] = min(1.0, reading + step.draft_busy / step.seconds * rate * decoding)
        if (prefill := deployment.prefill) is not None:
            used["prefill"] = all_of_them * prompts_apart(prefill, demand).busy / prefill.workers
        return used


def last(most: int, holds: Callable[[int], bool]) -> int:
    """The last of 1 to `most` for which `holds`, which must be monotonic; 0: none."""
    return most - bisect_left(range(most, 0, -1), True, key=holds)


# -- prompts


class PromptTime(Struct, frozen=True, kw_only=True):
    chunks: int  # forwards that it is spread over
    alone: float  # seconds of these forwards, with nothing else in them
    beside: float  # seconds that it adds to forwards that there are anyway


def prompt_time(placed: PlacedModel, tokens: int, shared: float, sequences: int = 1) -> PromptTime:
    """Of `tokens`, of which the cache has `shared`, in even chunks beside steps of `sequences`. Each chunk reads the KV
    before it once; each row multiplies its query with all tokens before it."""
    new = max(1, round(tokens * (1 - shared)))
    chunks = math.ceil(new / CHUNK)
    rows, read = math.ceil(new / chunks), tokens - new / 2 - new / chunks / 2
    attending = placed.context_products_seconds(new, tokens - new / 2)
    decoding = ForwardLoad(rows=sequences)
    both = ForwardLoad(rows=sequences + rows)
    alone = placed.parts(ForwardLoad(rows=rows, context=read))
    added = placed.parts(both).seconds - placed.parts(decoding).seconds + alone.kv
    return PromptTime(chunks=chunks, alone=chunks * alone.seconds + attending, beside=chunks * added + attending)


class PromptWork(Struct, frozen=True, kw_only=True):
    """Means over requests of all kinds, in seconds."""

    busy: float  # of a target for each request
    busy_squared: float  # the mean of its square
    chunks: float


def prompts_beside(deployment: Deployment, demand: Demand, sequences: int) -> PromptWork:
    """Nothing where prefill workers compute the prompts. A co-resident draft reads them too."""
    if deployment.prefill is not None:
        return PromptWork(busy=0.0, busy_squared=0.0, chunks=0.0)
    models: list[PlacedModel] = [deployment.target]
    if deployment.draft is not None and deployment.draft.resident:
        models.append(deployment.draft.placed)
    times = [[prompt_time(m, k.prompt, demand.shared, sequences) for m in models] for k in demand.requests]
    busy = [sum(time.beside for time in kind) for kind in times]
    return _work(demand, busy, [kind[0].chunks for kind in times])


def prompts_apart(prefill: PrefillPlacement, demand: Demand) -> PromptWork:
    times = [prompt_time(prefill.placed, kind.prompt, demand.shared) for kind in demand.requests]
    return _work(demand, [time.alone for time in times], [time.chunks for time in times])


def hand_over_seconds(deployment: Deployment, demand: Demand) -> float:
    """Seconds of KV transfer that the layers' own time does not hide."""
    size = demand.prompt * (1 - demand.shared) * deployment.target.kv_bytes
    return EXPOSED * deployment.link.exchange(size)


def wait_seconds(arrivals: float, load: PromptWork) -> float:
    """Wait in a queue of one server with random arrivals (Pollaczek and Khinchine); inf where it cannot keep up."""
    if (utilisation := arrivals * load.busy) >= 1:
        return math.inf
    return arrivals * load.busy_squared / (2 * (1 - utilisation))


def _work(demand: Demand, busy: Sequence[float], chunks: Iterable[int]) -> PromptWork:
    squares = demand.mean(seconds**2 for seconds in busy)
    return PromptWork(busy=demand.mean(busy), busy_squared=squares, chunks=demand.mean(chunks))
