from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, TypeAlias

from msgspec import Struct

from pilotfish.core.cache.tiers import TierCounts, TierUse
from pilotfish.engine.targets.replica import ReplicaHealth, RoutedTokens
from pilotfish.server.observe.metrics import DECLARED, ServerMetrics
from pilotfish.wire.serving import PoolLoad, Status

#: Slots told as one block of vLLM's: gateways that hash prompts raise smaller blocks to this, and keep their number.
BLOCK_SLOTS = 64
NOT_ROUTED = RoutedTokens()  # of a server with one target
#: Things of one kind, by the target that tells of them and their labels.
Things: TypeAlias = Mapping[tuple[str, tuple[str, ...]], Any]


#: A metric, what it tells of a thing, and a divisor of that.
Told: TypeAlias = tuple[str, Callable[[Any], Any], float]


def _declared(form: str) -> Mapping[str, list[Told]]:
    """Metrics of a form, gauge or counter, by the kind of things that they tell of."""
    found = defaultdict[str, list[Told]](list)
    for name, family in DECLARED.items():
        if form in family and "of" in family:
            kind, attribute = family["of"].split(".", 1)
            found[kind].append((name, attrgetter(attribute), family.get("divisor", 1)))
    return found


GAUGES, COUNTERS = _declared("gauge"), _declared("counter")


class FleetMetrics:
    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._totals: dict[tuple[str, ...], float] = {}  # the last totals, by replica and metric
        self._shown: dict[tuple[str, ...], Collection[tuple[str, ...]]] = {}  # labelled gauges now, by their families

    def tell(self, replicas: Sequence[ReplicaHealth], resumed: int = 0, routed: RoutedTokens = NOT_ROUTED) -> None:
        self._metrics["pilotfish_target_ready"].set(any(replica.ready for replica in replicas))
        self._add_total("", sum(replica.restarts for replica in replicas), "pilotfish_target_restarts")
        self._add_total("", resumed, "pilotfish_resumed_requests")
        for kind, tokens in vars(routed).items():
            self._add_total("", tokens, "pilotfish_routed_tokens", kind)
        self._tell("replicas", {(each.name, (each.name,)): _with_load(each) for each in replicas})
        self._tell_statuses({replica.name: replica.status for replica in replicas if replica.status is not None})

    def _tell_statuses(self, statuses: Mapping[str, Status]) -> None:
        found = statuses.values()
        self._tell("fleet", {("", ()): _load(found)})
        self._tell("statuses", {(replica, ()): status for replica, status in statuses.items()})
        for kind in ("pools", "prefill_pools", "shadows", "tiers"):
            self._tell(kind, _things(statuses, kind))
        self._tell("handovers", _handovers(statuses))
        self._tell("tier_sums", _tier_sums(tier for status in found for tier in status.tiers))
        for replica, status in statuses.items():
            self._count_moved(replica, status.tiers, status.tier_counts)
        if statuses:
            slots = sum(status.identity.kv_slots for status in found)
            config = (str(BLOCK_SLOTS), str(slots // BLOCK_SLOTS), next(iter(found)).identity.dtype)
            self._show({("vllm:cache_config_info", *config): 1}, "vllm:cache_config_info")

    def _count_moved(self, replica: str, tiers: Sequence[TierUse], counts: TierCounts) -> None:
        for tier in tiers:
            loaded = counts.moved_bytes.get(tier.name, 0)
            self._add_total(replica, tier.saved_bytes, "pilotfish_kv_moved_bytes", "save", tier.name)
            self._add_total(replica, loaded, "pilotfish_kv_moved_bytes", "load", tier.name)
        for outcome in ("saved", "lost", "given_up", "recomputed"):
            self._add_total(replica, getattr(counts, outcome), "pilotfish_kv_objects", outcome)

    def _tell(self, kind: str, things: Things) -> None:
        """If several targets know one thing, the last target's gauges are shown. A text is a gauge's last label."""
        gauges = dict[tuple[str, ...], float]()
        latest = {labels: thing for (_, labels), thing in things.items()}
        for labels, thing in latest.items():
            for metric, value_of, divisor in GAUGES[kind]:
                value = value_of(thing)
                if not isinstance(value, str):
                    gauges[metric, *labels] = value / divisor
                elif value:
                    gauges[metric, *labels, value] = 1
        self._show(gauges, *(metric for metric, _, _ in GAUGES[kind]))
        for (replica, labels), thing in things.items():
            for metric, value_of, _ in COUNTERS[kind]:
                for own, total in _totals(value_of(thing)).items():
                    self._add_total(replica, total, metric, *labels, *own)

    def _show(self, gauges: Mapping[tuple[str, ...], float], *families: str) -> None:
        """Clears families only where their labels have changed: scrapes in other threads need them."""
        if gauges.keys() != self._shown.get(families, set()):
            self._metrics.empty(*families)
            self._shown[families] = gauges.keys()
        for gauge, value in gauges.items():
            self._metrics[gauge].set(value)

    def _add_total(self, replica: str, total: float, *metric: str) -> None:
        """Feed a counter with a total that restarts at 0 when its process does."""
        last = self._totals.get((replica, *metric), 0)
        self._metrics[metric].inc(total - last if total >= last else total)
        self._totals[replica, *metric] = total


def _totals(value: float | Mapping[str, float] | Sequence[float]) -> Mapping[tuple[str, ...], float]:
    """By their own label, if any: a name, or a position."""
    if isinstance(value, Mapping):
        return {(name,): total for name, total in value.items()}
    return {(str(i),): total for i, total in enumerate(value)} if isinstance(value, Sequence) else {(): value}


def _with_load(replica: ReplicaHealth) -> SimpleNamespace:
    return _load([] if replica.status is None else [replica.status], ready=replica.ready, requests=replica.requests)


def _load(statuses: Collection[Status], **own: Any) -> SimpleNamespace:
    sums = {name: sum(getattr(one, name) for one in statuses) for name in ("running", "waiting", "pending_tokens")}
    slots, free = sum(one.identity.kv_slots for one in statuses), sum(one.free_slots for one in statuses)
    return SimpleNamespace(kv_usage=1 - free / slots if slots else 0.0, **sums, **own)


def _things(statuses: Mapping[str, Status], field: str) -> Things:
    """By name. Targets give their own workers equal names, unlike the pools that they share."""
    told = [(replica, one) for replica, status in statuses.items() for one in getattr(status, field)]
    several = len(statuses) > 1
    owned = [(replica, one, several and getattr(one, "own", False)) for replica, one in told]
    return {(replica, (f"{replica} {one.name}" if own else one.name,)): one for replica, one, own in owned}


def _handovers(statuses: Mapping[str, Status]) -> Things:
    pools = _things(statuses, "prefill_pools").items()
    return {
        (replica, (*labels, transport)): totals
        for (replica, labels), pool in pools
        for transport, totals in pool.totals.items()
    }


def _tier_sums(tiers: Iterable[TierUse]) -> Things:
    used, capacity = Counter[str](), Counter[str]()
    for tier in tiers:
        used[tier.name] += tier.used
        capacity[tier.name] += tier.capacity
    return {("", (name,)): TierUse(name, used[name], capacity[name]) for name in used}


class KnownPool(Struct, frozen=True):
    """A draft pool as one target knows it; another target may know it, too."""

    target: str
    pool: PoolLoad

    @property
    def acceptance(self) -> float | None:
        return self.pool.accepted / self.pool.verified if self.pool.verified else None

    @property
    def lateness(self) -> float | None:
        return self.pool.drops.get("late_nodes", 0) / self.pool.nodes if self.pool.nodes else None

    @property
    def state(self) -> str:
        if self.pool.refusal is not None:
            return "refuses"
        if not self.pool.ready:
            return "silent"
        return "busy" if self.pool.busy else "ready"


class DraftPools(Struct, frozen=True):
    data: list[KnownPool]
    object: str = "list"


def pools_of(replicas: Sequence[ReplicaHealth]) -> DraftPools:
    statuses = [(replica.name, replica.status) for replica in replicas if replica.status is not None]
    return DraftPools([KnownPool(target, pool) for target, status in statuses for pool in status.pools])


def draft_revisions(replicas: Sequence[ReplicaHealth]) -> dict[str, str]:
    return {known.pool.name: known.pool.revision for known in pools_of(replicas).data}
