from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from pilotfish.core.cache.tiers import TierCounts, TierUse
from pilotfish.engine.targets.replica import ReplicaHealth, RoutedTokens
from pilotfish.server.observe.metrics import ServerMetrics
from pilotfish.wire.serving import PoolLoad, PrefillPoolLoad, ShadowReport, Status

#: Gauges of things that come and go, by the beginning of their names.
GAUGES = {
    "pilotfish_replica": ("ready", "requests", "running", "waiting", "pending_tokens", "kv_usage"),
    "pilotfish_pool": ("ready", "sessions", "free_slots", "step_seconds", "queue_seconds"),
    "pilotfish_prefill_pool": ("ready", "queued_tokens", "free_slots", "token_seconds", "leases"),
    "pilotfish_shadow": ("ready", "tokens_per_second", "live_tokens_per_second", "error"),
    "pilotfish_kv": ("used_bytes", "capacity_bytes"),
}
#: Slots told as one block of vLLM's: gateways that hash prompts raise smaller blocks to this, and keep their number.
BLOCK_SLOTS = 64
#: Of a server with one target.
NOT_ROUTED = RoutedTokens()


class FleetMetrics:
    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._totals: dict[tuple[str, ...], float] = {}  # the last totals, by replica and metric
        self._shown: dict[str, Mapping[str, str]] = {}  # what has gauges now, by the beginning of their names

    def tell(self, replicas: Sequence[ReplicaHealth], resumed: int = 0, routed: RoutedTokens = NOT_ROUTED) -> None:
        self._metrics["pilotfish_target_ready"].set(any(replica.ready for replica in replicas))
        self._add_total("", sum(replica.restarts for replica in replicas), "pilotfish_target_restarts")
        self._add_total("", resumed, "pilotfish_resumed_requests")
        for kind, tokens in vars(routed).items():
            self._add_total("", tokens, "pilotfish_routed_tokens", kind)
        of_each = {each.name: (each.ready, each.requests, *_load(each.status)) for each in replicas}
        self._show("pilotfish_replica", of_each)
        self._set_statuses({replica.name: replica.status for replica in replicas if replica.status is not None})

    def _set_statuses(self, statuses: Mapping[str, Status]) -> None:
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
            config = {"block_size": str(BLOCK_SLOTS), "num_gpu_blocks": str(slots // BLOCK_SLOTS)}
            config["cache_dtype"] = next(iter(found)).identity.dtype
            if self._clear_changed("vllm:cache_config_info", config):
                self._metrics["vllm:cache_config_info", *config.values()].set(1)

    def _set_pools(self, statuses: Mapping[str, Status]) -> None:
        known = [(replica, pool) for replica, status in statuses.items() for pool in status.pools]
        pools = {(replica, _label(replica, pool, statuses)): pool for replica, pool in known}
        gauges = {
            label: (pool.ready, pool.sessions, pool.free_slots, pool.step_ms / 1000, pool.queue_ms / 1000)
            for (_, label), pool in pools.items()
        }
        self._show("pilotfish_pool", gauges, "revision", {label: pool.revision for (_, label), pool in pools.items()})
        for (replica, label), pool in pools.items():
            self._add_total(replica, pool.cached, "pilotfish_pool_cached_tokens", label)
            self._add_totals(replica, pool.drops, "pilotfish_pool_drops", label)
            self._add_total(replica, pool.feature_bytes, "pilotfish_pool_feature_bytes", label)
            self._add_totals(replica, pool.feature_drops, "pilotfish_pool_feature_drops", label)

    def _set_prefill_pools(self, statuses: Mapping[str, Status]) -> None:
        known = [(replica, pool) for replica, status in statuses.items() for pool in status.prefill_pools]
        pools = {(replica, _label(replica, pool, statuses)): pool for replica, pool in known}
        gauges = {
            label: (pool.ready, pool.queued_tokens, pool.free_slots, pool.token_ms / 1000, pool.leases)
            for (_, label), pool in pools.items()
        }
        transports = {label: pool.transport for (_, label), pool in pools.items()}
        self._show("pilotfish_prefill_pool", gauges, "transport", transports)
        for (replica, label), pool in pools.items():
            self._add_totals(replica, pool.refused, "pilotfish_prefill_pool_refused", label)
            for transport, totals in pool.totals.items():
                self._add_totals(replica, totals.outcomes, "pilotfish_handovers", label, transport)
                self._add_total(replica, totals.tokens, "pilotfish_handover_tokens", label, transport)
                self._add_total(replica, totals.size, "pilotfish_handover_bytes", label, transport)
                self._add_total(replica, totals.transfer, "pilotfish_handover_transfer_seconds", label, transport)
                self._add_total(replica, totals.hidden, "pilotfish_handover_hidden_seconds", label, transport)

    def _set_shadows(self, statuses: Mapping[str, Status]) -> None:
        """If several targets have one shadow, the last target's rates count."""
        shadows = [(replica, shadow) for replica, status in statuses.items() for shadow in status.shadows]
        gauges = {
            shadow.name: (shadow.ready, shadow.tokens_per_second, shadow.live_tokens_per_second, shadow.error)
            for _, shadow in shadows
        }
        self._show("pilotfish_shadow", gauges, "revision", {shadow.name: shadow.revision for _, shadow in shadows})
        for replica, shadow in shadows:
            self._count_shadow(replica, shadow)

    def _count_shadow(self, replica: str, shadow: ShadowReport) -> None:
        totals = {"steps": shadow.steps, "trees": shadow.trees, "late_steps": shadow.late, "hits": shadow.hits}
        totals |= {"requests": shadow.requests, "accepted_tokens": shadow.accepted}
        for name, total in {**totals, "cpu_seconds": shadow.cpu_seconds}.items():
            self._add_total(replica, total, f"pilotfish_shadow_{name}", shadow.name)
        for name, counts in (("tried", shadow.tried_by_depth), ("accepted", shadow.accepted_by_depth)):
            by_depth = {str(position): count for position, count in enumerate(counts)}
            self._add_totals(replica, by_depth, f"pilotfish_shadow_{name}_per_pos", shadow.name)

    def _set_tiers(self, tiers: Sequence[TierUse]) -> None:
        used, capacity = Counter[str](), Counter[str]()
        for tier in tiers:
            used[tier.name] += tier.used
            capacity[tier.name] += tier.capacity
        self._show("pilotfish_kv", {name: (used[name], capacity[name]) for name in used})

    def _count_tiers(self, replica: str, tiers: Sequence[TierUse], counts: TierCounts) -> None:
        for tier in tiers:
            loaded = counts.moved_bytes.get(tier.name, 0)
            self._add_total(replica, tier.evicted, "pilotfish_kv_evicted_tokens", tier.name)
            self._add_total(replica, tier.saved_bytes, "pilotfish_kv_moved_bytes", "save", tier.name)
            self._add_total(replica, loaded, "pilotfish_kv_moved_bytes", "load", tier.name)
            self._add_total(replica, tier.failed, "pilotfish_kv_failed_operations", tier.name)
            self._add_totals(replica, tier.damaged, "pilotfish_kv_damaged_objects", tier.name)
        outcomes = {name: getattr(counts, name) for name in ("saved", "lost", "given_up", "recomputed")}
        self._add_totals(replica, outcomes, "pilotfish_kv_objects")
        self._add_total(replica, counts.late, "pilotfish_kv_late_loads")
        self._add_total(replica, counts.loading_seconds, "pilotfish_kv_loading_seconds")
        self._add_total(replica, counts.computing_seconds, "pilotfish_kv_estimated_computing_seconds")

    def _show(
        self, prefix: str, rows: Mapping[str, Sequence[float]], detail: str = "", of: Mapping[str, str] | None = None
    ) -> None:
        """A row with a detail also has a gauge of 1 with the detail as a label. Rows that are gone leave no gauge."""
        names, info = [f"{prefix}_{name}" for name in GAUGES[prefix]], f"{prefix}_{detail}"
        self._clear_changed(prefix, of or dict.fromkeys(rows, ""), *names, *([info] if detail else []))
        for label, values in rows.items():
            for name, value in zip(names, values, strict=True):
                self._metrics[name, label].set(value)
        for label, text in (of or {}).items():
            if text:
                self._metrics[info, label, text].set(1)

    def _clear_changed(self, group: str, shown: Mapping[str, str], *names: str) -> bool:
        """Clears the gauges of a group only where its labels have changed: scrapes in other threads need them."""
        if shown == self._shown.get(group, {}):
            return False
        self._metrics.empty(*(names or [group]))
        self._shown[group] = shown
        return True

    def _add_totals(self, replica: str, totals: Mapping[str, float], *metric: str) -> None:
        for label, total in totals.items():
            self._add_total(replica, total, *metric, label)

    def _add_total(self, replica: str, total: float, *metric: str) -> None:
        """Feed a counter with a total that restarts at 0 when its process does."""
        last = self._totals.get((replica, *metric), 0)
        self._metrics[metric].inc(total - last if total >= last else total)
        self._totals[replica, *metric] = total


def _load(status: Status | None) -> tuple[float, ...]:
    if status is None:
        return (0, 0, 0, 0.0)
    return (status.running, status.waiting, status.pending_tokens, _used([status]))


def _used(statuses: Collection[Status]) -> float:
    slots = sum(status.identity.kv_slots for status in statuses)
    return 1 - sum(status.free_slots for status in statuses) / slots if slots else 0.0


def _label(replica: str, pool: PoolLoad | PrefillPoolLoad, statuses: Collection[str]) -> str:
    """Targets give their own workers equal names, unlike the pools that they share."""
    return f"{replica} {pool.name}" if pool.own and len(statuses) > 1 else pool.name
