"""Which KV the prefix cache keeps: requests of a trace, and of tenants whose prompts begin alike, found in pools of
several sizes. No model runs: a slot holds a block of tokens, and requests come one at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from harness import Options, run

from pilotfish.cli.bench.report import ProgressBar, Report, Row
from pilotfish.core.cache.prefix_cache import PrefixCache
from pilotfish.core.cache.slots import SlotPool
from pilotfish.errors import ParameterError
from pilotfish.plan.trace import BLOCK_TOKENS, read_trace

LRU = "LRU"
#: Of the tenants' requests: their number; tenants, of which the i-th sends 1/i as many as the first; blocks that begin
#: each, and at most of what follows those; every n-th is a document that nobody sends again, of so many blocks.
REQUESTS, TENANTS, SYSTEM_BLOCKS, OTHER_BLOCKS, DOCUMENT_EVERY, DOCUMENT_BLOCKS = 10_000, 200, 8, 16, 20, 128


@dataclass(frozen=True)
class TracedRequest:
    input_length: int
    hash_ids: list[int]
    salt: str | None = None


def run_eviction(options: Options, progress: ProgressBar) -> Report:
    """Hit rates: of all prompts' tokens, the share that was found."""
    capacities, shares = options.capacities, options.shares
    workloads = {"tenants": tenants()}
    if options.trace:
        trace = [TracedRequest(one.input_length, one.hash_ids) for one in read_trace(Path(options.trace))]
        workloads = {"trace": trace, **workloads}
    longest = max(len(one.hash_ids) for arrivals in workloads.values() for one in arrivals)
    if min(capacities) < longest:
        raise ParameterError("capacities", options.capacities, f"at least {longest}, the blocks of the longest request")
    progress.total = len(workloads) * len(capacities) * len(shares)
    rows: list[Row] = []
    for name, arrivals in workloads.items():
        for capacity in capacities:
            row: Row = {"workload": name, "blocks": capacity}
            for share in shares:
                row[f"{share:g} proven" if share else LRU] = hit_rate(arrivals, capacity, share)
                progress(f"{name}, {capacity} blocks")
            rows.append(row)
    unlimited = {name: hit_rate(arrivals, distinct_blocks(arrivals), 0) for name, arrivals in workloads.items()}
    return Report({"hit_rates": rows, "unlimited": unlimited})


def tenants(requests: int = REQUESTS) -> list[TracedRequest]:
    """Requests of tenants, each below a salt of its own: a beginning that they share and something new, or a
    document."""
    draw = np.random.default_rng(0)
    often = 1 / np.arange(1, TENANTS + 1)
    senders = draw.choice(TENANTS, requests, p=often / often.sum()).tolist()
    arrivals, first = [], SYSTEM_BLOCKS
    for index, (tenant, count) in enumerate(zip(senders, draw.integers(1, OTHER_BLOCKS + 1, requests), strict=True)):
        document = index % DOCUMENT_EVERY == 0
        new = range(first, first + (DOCUMENT_BLOCKS if document else int(count)))
        blocks = [*([] if document else range(SYSTEM_BLOCKS)), *new]
        arrivals.append(TracedRequest(BLOCK_TOKENS * len(blocks), blocks, f"tenant {tenant}"))
        first = new.stop
    return arrivals


def hit_rate(arrivals: Sequence[TracedRequest], capacity: int, proven_share: float) -> float:
    """Of all prompts' tokens, the share that a cache in a pool of `capacity` blocks has."""
    pool = SlotPool(capacity)
    cache = PrefixCache(pool, proven_share)
    found = 0
    for arrival in arrivals:
        blocks = arrival.hash_ids
        shared = cache.match(arrival.salt, blocks)
        pool.share(shared)
        slots = np.concatenate((shared, cache.allocate(len(blocks) - len(shared))))
        pool.release(cache.insert(arrival.salt, blocks, slots))
        found += min(len(shared) * BLOCK_TOKENS, arrival.input_length)
    return found / sum(arrival.input_length for arrival in arrivals)


def distinct_blocks(arrivals: Sequence[TracedRequest]) -> int:
    return len({(arrival.salt, block) for arrival in arrivals for block in arrival.hash_ids})


if __name__ == "__main__":
    run(run_eviction, trace="", capacities=[1000, 3000, 10_000, 30_000, 50_000], shares=[0.0, 0.2])
