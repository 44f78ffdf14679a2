import time
from collections.abc import Sequence
from importlib import metadata

from pilotfish.config.fields import model_name
from pilotfish.core.cache.tiers import DEVICE, TierCounts, TierUse
from pilotfish.core.drafting.messages import Load
from pilotfish.core.drafting.pools import DraftPool
from pilotfish.core.drafting.target_machine import Arrival
from pilotfish.core.drafting.vocabulary import text_digest
from pilotfish.core.prefilling.prefill_messages import PrefillLoad
from pilotfish.core.prefilling.prefill_pools import PrefillPool
from pilotfish.engine.engine import Engine
from pilotfish.model.loading.metadata import config_digest
from pilotfish.printable import printable
from pilotfish.wire.serving import Identity, PoolLoad, PrefillPoolLoad, Status, StepReport
from pilotfish.workers.records import StepRecord

#: Of a pool that has not answered yet.
NO_LOAD, NO_PREFILL_LOAD = Load("", 0, 0, 0, 0, 0.0, 0.0), PrefillLoad(0, 0, 0.0, 0)


def status_of(engine: Engine, identity: Identity, incarnation: str) -> Status:
    scheduler = engine.worker.scheduler
    return Status(
        identity=identity,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        free_slots=scheduler.pool.num_available,
        preemptions=scheduler.preemptions,
        incarnation=incarnation,
        pending_tokens=sum(request.num_pending for request in (*scheduler.running, *scheduler.waiting)),
        pools=pools_of(engine),
        prefill_pools=prefill_pools_of(engine),
        tiers=tiers_of(engine),
        tier_counts=TierCounts() if engine.tiers is None else engine.tiers.counts,
        shadows=[] if engine.shadows is None else engine.shadows.reports(),
    )


def step_report(record: StepRecord, before: float | None, pushes: Sequence[Arrival] = ()) -> StepReport:
    """`before` is the end of the last step: the loop's time since then counts as this step's coordination."""
    draft = record.drafted - record.planned
    forward, verify = record.computed - record.prepared, record.verified - record.computed
    began = record.began if before is None else before
    same = ("sequences", "rows", "nodes", "accepted", "committed", "hits", "verified")
    return StepReport(
        at=record.began,
        draft=draft,
        forward=forward,
        verify=verify,
        coordination=max(0.0, record.ended - began - draft - forward - verify),
        **{name: getattr(record, name) for name in same},
        pushes=list(pushes),
    )


def identity_of(engine: Engine) -> Identity:
    config = engine.config
    return Identity(
        model=model_name(config.target),
        mode=config.mode,
        dtype=engine.precision.name,
        context=engine.model.config.context,
        vocab_size=engine.model.config.vocab_size,
        kv_slots=engine.memory.slots,
        longest=engine.worker.scheduler.longest(engine.model.config.context),
        max_requests=engine.worker.scheduler.max_requests,
        max_nodes=0 if config.mode == "off" else config.nodes,
        quantization=config.quantization,
        kv_dtype=config.kv_dtype,
        tokenizer=text_digest(engine.tokenizer),
        config=config_digest(config.target),
        version=metadata.version("pilotfish"),
        ranks=config.tensor_parallel,
        exact=engine.exact,
    )


def tiers_of(engine: Engine) -> list[TierUse]:
    cache, size = engine.worker.scheduler.cache, engine.memory.target.slot
    used, capacity = cache.pool.capacity - cache.pool.num_free, cache.pool.capacity
    device = TierUse(DEVICE, used * size, capacity * size, evicted=cache.evicted)
    return [device, *([] if engine.tiers is None else engine.tiers.use())]


def arrivals_at(engine: Engine) -> list[Arrival]:
    """Since the last call; the channel's thread may append meanwhile."""
    if engine.remote is None:
        return []
    arrivals = engine.remote.drafter.machine.arrivals
    return [arrivals.popleft() for _ in range(len(arrivals))]


def pools_of(engine: Engine) -> list[PoolLoad]:
    if engine.remote is None:
        return []
    own = engine.config.starts_drafts
    return [_pool_load(pool, pool.load or NO_LOAD, own) for pool in engine.remote.pools]


def _pool_load(pool: DraftPool, load: Load, own: bool) -> PoolLoad:
    delay, counts = pool.echo.delay, ("trees", "nodes", "verified", "accepted")
    same = ("sessions", "free_slots", "step_ms", "queue_ms", "revision", "model", "slots")
    return PoolLoad(
        name=pool.name,
        ready=pool.ready,
        **{name: getattr(load, name) for name in same},
        drops=pool.drops.counts,
        cached=load.own_cached,
        own=own,
        feature_bytes=pool.features.size,
        feature_drops=pool.feature_drops,
        capabilities=[printable(name) for name in load.capabilities],
        own_sessions=len(pool.sessions),
        busy=pool.is_busy(time.monotonic()),
        refusal=pool.refusal,
        delay_ms=None if delay is None else 1000 * delay,
        **{name: getattr(pool.score, name) for name in counts},
    )


def prefill_pools_of(engine: Engine) -> list[PrefillPoolLoad]:
    if engine.prefills is None:
        return []
    own = engine.config.prefill_workers > 0
    return [_prefill_pool_load(pool, pool.load or NO_PREFILL_LOAD, own) for pool in engine.prefills.pools]


def _prefill_pool_load(pool: PrefillPool, load: PrefillLoad, own: bool) -> PrefillPoolLoad:
    same = ("queued_tokens", "free_slots", "token_ms", "leases")
    return PrefillPoolLoad(
        name=pool.name,
        ready=pool.ready,
        transport=pool.transport if pool.ready else "",
        **{name: getattr(load, name) for name in same},
        totals=pool.totals,
        refused=pool.drops.counts,
        own=own,
    )
