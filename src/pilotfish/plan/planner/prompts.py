import math
from collections.abc import Iterable, Sequence

from msgspec import Struct

from pilotfish.config.hardware.cost import ForwardLoad, PlacedModel
from pilotfish.plan.planner.demand import Demand
from pilotfish.plan.planner.deployment import Deployment, PrefillPlacement

#: Rows of a forward of prompts alone.
CHUNK = 2048
#: Share of a transfer of KV between prefill workers and targets that forwards do not hide
#: (docs/benchmarks.md, What of a transfer is hidden).
EXPOSED = 0.1


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
