"""The metrics of a server's targets, as of their last status: what they are together, and each by its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from pilotfish.core.cache.tiers import TierCounts, TierUse
from pilotfish.core.prefilling.handover import HandOverTotals
from pilotfish.engine.targets.replica import ReplicaHealth, RoutedTokens
from pilotfish.server.observe.metric_families import Metrics
from pilotfish.wire.serving import PoolLoad, PrefillPoolLoad, ShadowReport, Status

POOL_GAUGES = [
    f"pilotfish_pool_{name}" for name in ("ready", "sessions", "free_slots", "step_seconds", "queue_seconds")
]
PREFILL_GAUGES = [
    f"pilotfish_prefill_pool_{name}" for name in ("ready", "queued_tokens", "free_slots", "token_seconds", "leases")
]
SHADOW_GAUGES = [
    f"pilotfish_shadow_{name}" for name in ("ready", "tokens_per_second", "live_tokens_per_second", "error")
]
TIER_GAUGES = ["pilotfish_kv_used_bytes", "pilotfish_kv_capacity_bytes"]
REPLICA_GAUGES = [
    f"pilotfish_replica_{name}" for name in ("ready", "requests", "running", "waiting", "pending_tokens", "kv_usage")
]
#: Slots that count as one block of vLLM's: gateways that hash prompts raise smaller blocks to this size, and keep their
#: number.
BLOCK_SLOTS = 64

#: Of a server with one target.
NOT_ROUTED = RoutedTokens()


class FleetMetrics:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._totals: dict[tuple[str, ...], float] = {}  # the last ones, by replica and metric
        self._cache_config: tuple[str, ...] = ()
        self._replicas: set[str] = set()
        self._pools: dict[str, str] = {}  # revisions, by pool
        self._prefill_pools: dict[str, str] = {}  # transports, by pool
        self._shadows: dict[str, str] = {}  # revisions, by pool

    def tell(self, replicas: Sequence[ReplicaHealth], resumed: int = 0, routed: RoutedTokens = NOT_ROUTED) -> None:
        """The targets now, how many requests have gone on at another one, and what came of the choices."""
        self._metrics["pilotfish_target_ready"].set(any(replica.ready for replica in replicas))
        self._add_total("", sum(replica.restarts for replica in replicas), "pilotfish_target_restarts")
        self._add_total("", resumed, "pilotfish_resumed_requests")
        for kind, tokens in vars(routed).items():
            self._add_total("", tokens, "pilotfish_routed_tokens", kind)
        self._set_replicas(replicas)
        self._set_statuses({replica.name: replica.status for replica in replicas if replica.status is not None})

    def _set_replicas(self, replicas: Sequence[ReplicaHealth]) -> None:
        """Those that are not there any more leave no gauge."""
        if (names := {replica.name for replica in replicas}) != self._replicas:
            self._metrics.empty(*REPLICA_GAUGES)
            self._replicas = names
        for replica in replicas:
            values = (replica.ready, replica.requests, *_load(replica.status))
            for name, value in zip(REPLICA_GAUGES, values, strict=True):
                self._metrics[name, replica.name].set(value)

    def _set_statuses(self, statuses: Mapping[str, Status]) -> None:
        """What one held that has ended is gone with it."""
        found = statuses.values()
        self._metrics["vllm:num_requests_running"].set(sum(status.running for status in found))
        self._metrics["vllm:num_requests_waiting"].set(sum(status.waiting for status in found))
        self._metrics["vllm:kv_cache_usage_perc"].set(_used(found))
        self._set_pools(statuses)
        self._set_prefill_pools(statuses)
        self._set_shadows(statuses)
        self._set_tiers([tier for status in found for tier in status.tiers])
        for replica, status in statuses.items():
            self._add_total(replica, status.preemptions, "vllm:num_preemptions")
            self._count_tiers(replica, status.tiers, status.tier_counts)
        if statuses:
            slots = sum(status.identity.kv_slots for status in found)
            self._set_cache_config(slots, next(iter(found)).identity.dtype)

    def _set_cache_config(self, slots: int, dtype: str) -> None:
        config = (str(BLOCK_SLOTS), str(slots // BLOCK_SLOTS), dtype)
        if config != self._cache_config:  # a scrape in another thread should find the gauge
            self._metrics.empty("vllm:cache_config_info")
            self._metrics["vllm:cache_config_info", *config].set(1)
            self._cache_config = config

    def _set_pools(self, statuses: Mapping[str, Status]) -> None:
        """Pools that are not there any more leave no gauge; what was counted stays."""
        pools = [(replica, pool) for replica, status in statuses.items() for pool in status.pools]
        labels = [_label(replica, pool, statuses) for replica, pool in pools]
        revisions = {label: pool.revision for label, (_, pool) in zip(labels, pools, strict=True)}
        if revisions != self._pools:
            self._metrics.empty("pilotfish_pool_revision", *POOL_GAUGES)
            self._pools = revisions
        for (replica, pool), label in zip(pools, labels, strict=True):
            values = (pool.ready, pool.sessions, pool.free_slots, pool.step_ms / 1000, pool.queue_ms / 1000)
            for name, value in zip(POOL_GAUGES, values, strict=True):
                self._metrics[name, label].set(value)
            if pool.revision:
                self._metrics["pilotfish_pool_revision", label, pool.revision].set(1)
            self._add_total(replica, pool.cached, "pilotfish_pool_cached_tokens", label)
            for reason, count in pool.drops.items():
                self._add_total(replica, count, "pilotfish_pool_drops", label, reason)
            self._add_total(replica, pool.feature_bytes, "pilotfish_pool_feature_bytes", label)
            for reason, count in pool.feature_drops.items():
                self._add_total(replica, count, "pilotfish_pool_feature_drops", label, reason)

    def _set_shadows(self, statuses: Mapping[str, Status]) -> None:
        """Rates of one that several targets have are those that the last of them has told."""
        shadows = [(replica, shadow) for replica, status in statuses.items() for shadow in status.shadows]
        revisions = {shadow.name: shadow.revision for _, shadow in shadows}
        if revisions != self._shadows:
            self._metrics.empty("pilotfish_shadow_revision", *SHADOW_GAUGES)
            self._shadows = revisions
        for replica, shadow in shadows:
            values = (shadow.ready, shadow.tokens_per_second, shadow.live_tokens_per_second, shadow.error)
            for name, value in zip(SHADOW_GAUGES, values, strict=True):
                self._metrics[name, shadow.name].set(value)
            if shadow.revision:
                self._metrics["pilotfish_shadow_revision", shadow.name, shadow.revision].set(1)
            self._count_shadow(replica, shadow)

    def _count_shadow(self, replica: str, shadow: ShadowReport) -> None:
        totals = {"steps": shadow.steps, "trees": shadow.trees, "late_steps": shadow.late, "hits": shadow.hits}
        totals |= {"requests": shadow.requests, "accepted_tokens": shadow.accepted}
        for name, total in totals.items():
            self._add_total(replica, total, f"pilotfish_shadow_{name}", shadow.name)
        self._add_total(replica, shadow.cpu_seconds, "pilotfish_shadow_cpu_seconds", shadow.name)
        by_depth = {"tried": shadow.tried_by_depth, "accepted": shadow.accepted_by_depth}
        for name, counts in by_depth.items():
            for position, count in enumerate(counts):
                self._add_total(replica, count, f"pilotfish_shadow_{name}_per_pos", shadow.name, str(position))

    def _set_prefill_pools(self, statuses: Mapping[str, Status]) -> None:
        pools = [(replica, pool) for replica, status in statuses.items() for pool in status.prefill_pools]
        labels = [_label(replica, pool, statuses) for replica, pool in pools]
        transports = {label: pool.transport for label, (_, pool) in zip(labels, pools, strict=True)}
        if transports != self._prefill_pools:
            self._metrics.empty("pilotfish_prefill_pool_transport", *PREFILL_GAUGES)
            self._prefill_pools = transports
        for (replica, pool), label in zip(pools, labels, strict=True):
            values = (pool.ready, pool.queued_tokens, pool.free_slots, pool.token_ms / 1000, pool.leases)
            for name, value in zip(PREFILL_GAUGES, values, strict=True):
                self._metrics[name, label].set(value)
            if pool.transport:
                self._metrics["pilotfish_prefill_pool_transport", label, pool.transport].set(1)
            for transport, totals in pool.totals.items():
                self._add_handovers(replica, (label, transport), totals)
            for reason, count in pool.refused.items():
                self._add_total(replica, count, "pilotfish_prefill_pool_refused", label, reason)

    def _add_handovers(self, replica: str, labels: tuple[str, str], totals: HandOverTotals) -> None:
        """Of a pool, by a transport."""
        for outcome, count in totals.outcomes.items():
            self._add_total(replica, count, "pilotfish_handovers", *labels, outcome)
        self._add_total(replica, totals.tokens, "pilotfish_handover_tokens", *labels)
        self._add_total(replica, totals.size, "pilotfish_handover_bytes", *labels)
        self._add_total(replica, totals.transfer, "pilotfish_handover_transfer_seconds", *labels)
        self._add_total(replica, totals.hidden, "pilotfish_handover_hidden_seconds", *labels)

    def _set_tiers(self, tiers: Sequence[TierUse]) -> None:
        used, capacity = Counter[str](), Counter[str]()
        for tier in tiers:
            used[tier.name] += tier.used
            capacity[tier.name] += tier.capacity
        if not tiers:
            self._metrics.empty(*TIER_GAUGES)
        for name in used:
            for gauge, sizes in zip(TIER_GAUGES, (used, capacity), strict=True):
                self._metrics[gauge, name].set(sizes[name])

    def _count_tiers(self, replica: str, tiers: Sequence[TierUse], counts: TierCounts) -> None:
        for tier in tiers:
            self._add_total(replica, tier.evicted, "pilotfish_kv_evicted_tokens", tier.name)
            self._add_total(replica, tier.saved_bytes, "pilotfish_kv_moved_bytes", "save", tier.name)
            self._add_total(
                replica, counts.moved_bytes.get(tier.name, 0), "pilotfish_kv_moved_bytes", "load", tier.name
            )
            self._add_total(replica, tier.failed, "pilotfish_kv_failed_operations", tier.name)
            for reason, count in tier.damaged.items():
                self._add_total(replica, count, "pilotfish_kv_damaged_objects", tier.name, reason)
        for outcome in ("saved", "lost", "given_up", "recomputed"):
            self._add_total(replica, getattr(counts, outcome), "pilotfish_kv_objects", outcome)
        self._add_total(replica, counts.late, "pilotfish_kv_late_loads")
        self._add_total(replica, counts.loading_seconds, "pilotfish_kv_loading_seconds")
        self._add_total(replica, counts.computing_seconds, "pilotfish_kv_estimated_computing_seconds")

    def _add_total(self, replica: str, total: float, *metric: str) -> None:
        """Feed a counter with a total that begins at 0 again when the process that counts does."""
        last = self._totals.get((replica, *metric), 0)
        self._metrics[metric].inc(total - last if total >= last else total)
        self._totals[replica, *metric] = total


def _load(status: Status | None) -> tuple[float, ...]:
    return (
        (0, 0, 0, 0.0) if status is None else (status.running, status.waiting, status.pending_tokens, _used([status]))
    )


def _used(statuses: Collection[Status]) -> float:
    """Share of the KV slots that are not free."""
    slots = sum(status.identity.kv_slots for status in statuses)
    return 1 - sum(status.free_slots for status in statuses) / slots if slots else 0.0


def _label(replica: str, pool: PoolLoad | PrefillPoolLoad, statuses: Collection[str]) -> str:
    """Of several targets each names its own workers alike, unlike the pools that they share."""
    return f"{replica} {pool.name}" if pool.own and len(statuses) > 1 else pool.name
