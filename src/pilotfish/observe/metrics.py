"""The metrics of one server, in the text format of Prometheus or OpenMetrics: under vLLM's names, labels and meanings
for the dashboards and benchmark clients that read them, and under `pilotfish_` those that vLLM has no name for.

`metrics.toml` declares them, `docs/metrics.md` describes each.
"""

from __future__ import annotations

import collections
import tomllib
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from pilotfish.core.handover import WHOLE, HandOverReport, HandOverTotals
from pilotfish.core.tiers import DEVICE, TierCounts, TierUse
from pilotfish.observe.requests import RequestRecord
from pilotfish.wire.serving import Delta, PoolLoad, PrefillPoolLoad, Status, StepReport, Verified

DECLARATIONS = Path(__file__).with_name("metrics.toml")
KINDS: dict[str, Any] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
ENGINE = "0"
POOL_GAUGES = [
    f"pilotfish_pool_{name}" for name in ("ready", "sessions", "free_slots", "step_seconds", "queue_seconds")
]
PREFILL_GAUGES = [
    f"pilotfish_prefill_pool_{name}" for name in ("ready", "queued_tokens", "free_slots", "token_seconds", "leases")
]
#: Distinct tags of one server, whatever clients send; requests with further ones count as OTHER.
MAX_TAGS = 32
#: Slots that count as one block of vLLM's: gateways that hash prompts raise smaller blocks to this size, and keep their
#: number.
BLOCK_SLOTS = 64
NO_TAG, OTHER = "none", "other"
#: Of a prompt's tokens, those whose KV a prefill worker computed, and those whose KV was nowhere.
PREFILL, COMPUTED = "prefill", "computed"
TIER_GAUGES = ["pilotfish_kv_used_bytes", "pilotfish_kv_capacity_bytes"]
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Metrics(dict[str | tuple[str, ...], Any]):
    """Those that are declared, by name, or by name and the values of their own labels, in a registry of their own: a
    process can hold several servers."""

    def __init__(self, model_name: str) -> None:
        super().__init__()
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.of_requests: list[tuple[str, bool, attrgetter[Any]]] = []  # name, whether it has labels, what it observes
        self._model_name = model_name
        self._families: dict[str, tuple[Any, tuple[str, ...]]] = {}  # with the values of the labels that all have
        declared = tomllib.loads(DECLARATIONS.read_text("utf-8"))
        buckets = declared.pop("buckets")
        for name, family in declared.items():
            self._declare(name, family, buckets)

    def __missing__(self, key: str | tuple[str, ...]) -> Any:
        name, *values = (key,) if isinstance(key, str) else key
        family, first = self._families[name]
        metric = self[key] = family.labels(*first, *values)
        return metric

    def empty(self, *names: str) -> None:
        """Leave no sample of these families."""
        for name in names:
            self._families[name][0].clear()
        self.clear()

    def _declare(self, name: str, family: dict[str, Any], buckets: dict[str, list[float]]) -> None:
        (kind,) = KINDS.keys() & family.keys()
        labels = family.get("labels", ())
        first = {} if name.startswith("http_") else {"model_name": self._model_name}
        first |= {"engine": ENGINE} if name.startswith("vllm:") else {}
        options = {"buckets": buckets[family["buckets"]]} if kind == "histogram" else {}
        made = KINDS[kind](name, family[kind], (*first, *labels), registry=self.registry, **options)
        self._families[name] = made, tuple(first.values())
        for key in [(name, value) for value in family.get("values", ())] if labels else [name]:
            self[key]  # there from the start
        if "record" in family:
            self.of_requests.append((name, bool(labels), attrgetter(family["record"])))


class ServerMetrics:
    """The server feeds them in its loop."""

    def __init__(self, model_name: str) -> None:
        self._metrics = Metrics(model_name)
        self._tags: set[str] = set()
        self._totals: dict[tuple[str, ...], float] = {}  # the last ones
        self._cache_config: tuple[str, ...] = ()
        self._pools: set[str] = set()
        self._prefill_pools: dict[str, str] = {}  # transports, by pool

    def progress(self, step: StepReport, deltas: Sequence[Delta]) -> None:
        """A step of the target, and what it added to the outputs."""
        metrics = self._metrics
        metrics["pilotfish_step_seconds", "proposal"].observe(step.draft)
        metrics["pilotfish_step_seconds", "verify"].observe(step.forward + step.verify)
        metrics["pilotfish_step_seconds", "coordination"].observe(step.coordination)
        metrics["pilotfish_exposed_wait_seconds"].inc(step.draft)
        metrics["pilotfish_rows_computed"].inc(step.rows)
        metrics["pilotfish_rows_rejected"].inc(step.nodes - step.accepted)
        metrics["pilotfish_hits"].inc(step.hits)
        metrics["pilotfish_misses"].inc(step.sequences - step.hits)
        metrics["vllm:generation_tokens"].inc(sum(len(delta.tokens) for delta in deltas))
        if tokens := step.rows - step.nodes + step.accepted:
            metrics["vllm:iteration_tokens_total"].observe(tokens)
        trees = [verified for delta in deltas for verified in delta.verified if verified.nodes]
        if trees:
            self._count_trees(trees)

    def _count_trees(self, trees: Sequence[Verified]) -> None:
        """A draft, as vLLM counts them, is one sequence's tree in one step."""
        accepted, metrics = [tree.accepted for tree in trees], self._metrics
        metrics["vllm:spec_decode_num_drafts"].inc(len(trees))
        metrics["vllm:spec_decode_num_draft_tokens"].inc(sum(tree.nodes for tree in trees))
        metrics["vllm:spec_decode_num_accepted_tokens"].inc(sum(accepted))
        for position in range(max(accepted)):
            count = sum(length > position for length in accepted)
            metrics["vllm:spec_decode_num_accepted_tokens_per_pos", str(position)].inc(count)
        for origin, count in collections.Counter(origin for tree in trees for origin in tree.origins).items():
            metrics["pilotfish_accepted_tokens", origin].inc(count)

    # -- the target

    def target(self, ready: bool, restarts: int) -> None:
        """Whether the target takes requests, and how often it was started again since the server began."""
        self._metrics["pilotfish_target_ready"].set(ready)
        self._add_total(restarts, "pilotfish_target_restarts")
        if not ready:  # it has ended, and what it held with it
            self._set_load(0, 0, 0.0)
            self._set_pools(())
            self._set_prefill_pools(())
            self._metrics.empty(*TIER_GAUGES)

    def status(self, status: Status) -> None:
        slots = status.identity.kv_slots
        self._set_load(status.running, status.waiting, 1 - status.free_slots / slots)
        self._add_total(status.preemptions, "vllm:num_preemptions")
        self._set_pools(status.pools)
        self._set_prefill_pools(status.prefill_pools)
        self._set_tiers(status.tiers, status.tier_counts)
        config = (str(BLOCK_SLOTS), str(slots // BLOCK_SLOTS), status.identity.dtype)
        if config != self._cache_config:  # a scrape in another thread should find the gauge
            self._metrics.empty("vllm:cache_config_info")
            self._metrics["vllm:cache_config_info", *config].set(1)
            self._cache_config = config

    def _set_load(self, running: int, waiting: int, used: float) -> None:
        self._metrics["vllm:num_requests_running"].set(running)
        self._metrics["vllm:num_requests_waiting"].set(waiting)
        self._metrics["vllm:kv_cache_usage_perc"].set(used)

    def _set_pools(self, pools: Sequence[PoolLoad]) -> None:
        """Pools that are not there any more leave no gauge; what was counted stays."""
        if (names := {pool.name for pool in pools}) != self._pools:
            self._metrics.empty(*POOL_GAUGES)
            self._pools = names
        for pool in pools:
            values = (pool.ready, pool.sessions, pool.free_slots, pool.step_ms / 1000, pool.queue_ms / 1000)
            for name, value in zip(POOL_GAUGES, values, strict=True):
                self._metrics[name, pool.name].set(value)
            self._add_total(pool.cached, "pilotfish_pool_cached_tokens", pool.name)
            for reason, count in pool.drops.items():
                self._add_total(count, "pilotfish_pool_drops", pool.name, reason)

    def _set_prefill_pools(self, pools: Sequence[PrefillPoolLoad]) -> None:
        if (transports := {pool.name: pool.transport for pool in pools}) != self._prefill_pools:
            self._metrics.empty("pilotfish_prefill_pool_transport", *PREFILL_GAUGES)
            self._prefill_pools = transports
        for pool in pools:
            values = (pool.ready, pool.queued_tokens, pool.free_slots, pool.token_ms / 1000, pool.leases)
            for name, value in zip(PREFILL_GAUGES, values, strict=True):
                self._metrics[name, pool.name].set(value)
            if pool.transport:
                self._metrics["pilotfish_prefill_pool_transport", pool.name, pool.transport].set(1)
            for transport, totals in pool.totals.items():
                self._add_handovers((pool.name, transport), totals)
            for reason, count in pool.refused.items():
                self._add_total(count, "pilotfish_prefill_pool_refused", pool.name, reason)

    def _add_handovers(self, labels: tuple[str, str], totals: HandOverTotals) -> None:
        """Of a pool, by a transport."""
        for outcome, count in totals.outcomes.items():
            self._add_total(count, "pilotfish_handovers", *labels, outcome)
        self._add_total(totals.tokens, "pilotfish_handover_tokens", *labels)
        self._add_total(totals.size, "pilotfish_handover_bytes", *labels)
        self._add_total(totals.transfer, "pilotfish_handover_transfer_seconds", *labels)
        self._add_total(totals.hidden, "pilotfish_handover_hidden_seconds", *labels)

    def _set_tiers(self, tiers: Sequence[TierUse], counts: TierCounts) -> None:
        for tier in tiers:
            for name, size in zip(TIER_GAUGES, (tier.used, tier.capacity), strict=True):
                self._metrics[name, tier.name].set(size)
            self._add_total(tier.evicted, "pilotfish_kv_evicted_tokens", tier.name)
            self._add_total(tier.saved_bytes, "pilotfish_kv_moved_bytes", "save", tier.name)
            self._add_total(counts.moved_bytes.get(tier.name, 0), "pilotfish_kv_moved_bytes", "load", tier.name)
            self._add_total(tier.failed, "pilotfish_kv_failed_operations", tier.name)
            for reason, count in tier.damaged.items():
                self._add_total(count, "pilotfish_kv_damaged_objects", tier.name, reason)
        for outcome in ("saved", "lost", "given_up", "recomputed"):
            self._add_total(getattr(counts, outcome), "pilotfish_kv_objects", outcome)
        self._add_total(counts.late, "pilotfish_kv_late_loads")
        self._add_total(counts.loading_seconds, "pilotfish_kv_loading_seconds")
        self._add_total(counts.computing_seconds, "pilotfish_kv_estimated_computing_seconds")

    def _add_total(self, total: float, *metric: str) -> None:
        """Feed a counter with a total that begins at 0 again when the process that counts does."""
        last = self._totals.get(metric, 0)
        self._metrics[metric].inc(total - last if total >= last else total)
        self._totals[metric] = total

    # -- requests

    def started(self) -> None:
        """A request is submitted; `finished` follows, once, however it ends."""
        self._metrics["pilotfish_requests_in_flight"].inc()

    def first_token(self, seconds: float, prompt_tokens: int) -> None:
        self._metrics["vllm:time_to_first_token_seconds"].observe(seconds)
        self._metrics["vllm:prompt_tokens"].inc(prompt_tokens)

    def prefix(self, tokens: int, cached: Mapping[str, int], handed_over: int = 0) -> None:
        """A prompt of so many `tokens` begins; the KV of `cached` of them was there, by tier, and that of up to
        `handed_over` others came from prefill workers: a sequence that began twice may have found some of it."""
        found, device = sum(cached.values()), cached.get(DEVICE, 0)
        self._metrics["vllm:prefix_cache_queries"].inc(tokens)
        self._metrics["vllm:prefix_cache_hits"].inc(device)
        self._metrics["vllm:external_prefix_cache_queries"].inc(tokens - device)
        self._metrics["vllm:external_prefix_cache_hits"].inc(found - device)
        came = min(handed_over, tokens - found)
        for source, count in {**cached, PREFILL: came, COMPUTED: tokens - found - came}.items():
            self._metrics["pilotfish_kv_prompt_tokens", source].inc(count)

    def handover(self, report: HandOverReport) -> None:
        """A request's hand-over has ended."""
        of_whole = ("queued", "computing", "exposed") if report.told else ()
        for part in of_whole if report.outcome == WHOLE else ("lost",):
            self._metrics["pilotfish_handover_seconds", report.pool, part].observe(getattr(report, part))

    def inter_token(self, seconds: float) -> None:
        self._metrics["vllm:inter_token_latency_seconds"].observe(seconds)

    def finished(self, record: RequestRecord) -> None:
        reason, facts = str(record.reason), record.facts
        labels = (self.label(facts.tag), facts.mode, facts.output)
        self._metrics["pilotfish_requests_in_flight"].dec()
        self._metrics["vllm:request_success", reason].inc()
        self._metrics["pilotfish_requests", *labels, reason].inc()
        self._metrics["pilotfish_request_tokens", *labels, "prompt"].inc(facts.prompt_tokens)
        self._metrics["pilotfish_request_tokens", *labels, "generation"].inc(record.generation_tokens)
        for name, labelled, observed in self._metrics.of_requests:
            if (value := observed(record)) is not None:
                self._metrics[(name, *labels) if labelled else name].observe(value)

    def feedback(self, labels: tuple[str, str], outcome: str, score: float, tokens: int, steps: int) -> None:
        """Of a request of a category and mode, the labels, which had so many `tokens` in so many `steps`."""
        self._metrics["pilotfish_feedback", *labels, outcome].inc()
        self._metrics["pilotfish_feedback_score", *labels].inc(score)
        self._metrics["pilotfish_feedback_tokens", *labels].inc(tokens)
        self._metrics["pilotfish_feedback_steps", *labels].inc(steps)

    def label(self, tag: str | None) -> str:
        """The first MAX_TAGS tags, of requests or feedback, are labels of their own."""
        if tag is None:
            return NO_TAG
        if len(self._tags) < MAX_TAGS:
            self._tags.add(tag)
        return tag if tag in self._tags else OTHER

    # -- answers

    def rejected(self, code: int) -> None:
        """A request was refused with this HTTP status before the target saw it."""
        self._metrics["pilotfish_requests_rejected", str(code)].inc()

    def http(self, route: str, method: str, status: int) -> None:
        """An HTTP answer; `route` is the route's pattern, never the path that a client sent."""
        self._metrics["http_requests", route, method if method in METHODS else OTHER, f"{status // 100}xx"].inc()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """All samples now, in OpenMetrics where the Accept header asks for it, and their Content-Type. Takes
        milliseconds; any thread may."""
        registry = self._metrics.registry
        if "application/openmetrics-text" in accept:
            # Its default escaping makes vllm_ of vllm:, which OpenMetrics allows as it is.
            body = openmetrics.generate_latest(registry, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
            return body, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
