"""The metrics of one server, in the text format of Prometheus or OpenMetrics. `docs/metrics.md` describes each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from pilotfish.observe.requests import RequestRecord
from pilotfish.observe.vllm_metrics import Families, Total, VllmMetrics
from pilotfish.wire.serving import Delta, PoolLoad, Status, StepReport

#: Distinct tags of one server, whatever clients send; requests with further ones count as OTHER.
MAX_TAGS = 32
NO_TAG, OTHER = "none", "other"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
LENGTHS = (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12, 16)
#: Seconds.
PARTS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
STEP_PARTS = ("proposal", "verify", "coordination")
POOL_GAUGES = {
    "ready": "1: the pool answers.",
    "sessions": "Sequences that it drafts for, of all targets.",
    "free_slots": "KV slots that nobody holds.",
    "step_seconds": "Time of one of its levels.",
    "queue_seconds": "Time that a commit waits for its turn.",
}


@dataclass(frozen=True)
class Rendered:
    """The body and Content-Type of an answer to a scrape."""

    body: bytes
    content_type: str


class ServerMetrics:
    """Metrics under vLLM's names, and under `pilotfish_` those that vLLM has no name for. The server feeds them in its
    loop."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        families = Families(self._registry, {"model_name": model_name})
        self._vllm = VllmMetrics(self._registry, model_name)
        self._steps = StepMetrics(families)
        self._pools = PoolMetrics(families)
        self._requests = RequestMetrics(families)
        self._ready = families.gauge("pilotfish_target_ready", "1: the target takes requests.")
        self._restarts = Total(families.counter("pilotfish_target_restarts", "Starts of the target after its first."))
        self._rejected = families.counters(
            "pilotfish_requests_rejected", "Requests refused before a target saw them, by HTTP status.", "code"
        )
        self._http = Families(self._registry, {}).counters(
            "http_requests", "HTTP requests answered.", "handler", "method", "status"
        )
        self.first_token = self._vllm.first_token
        self.inter_token = self._vllm.inter_token

    def progress(self, step: StepReport, deltas: Sequence[Delta]) -> None:
        """A step of the target, and what it added to the outputs."""
        self._vllm.progress(step, deltas)
        self._steps.progress(step, deltas)

    def status(self, status: Status) -> None:
        self._vllm.status(status)
        self._pools.set(status.pools)

    def target(self, ready: bool, restarts: int) -> None:
        """Whether the target takes requests, and how often it was started again since the server began."""
        self._ready.set(ready)
        self._restarts.set(restarts)
        if not ready:
            self._vllm.gone()
            self._pools.set(())

    def started(self) -> None:
        """A request is submitted; `finished` follows, once, however it ends."""
        self._requests.in_flight.inc()

    def finished(self, record: RequestRecord) -> None:
        self._vllm.finished(record)
        self._requests.finished(record)

    def rejected(self, code: int) -> None:
        """A request was refused with this HTTP status before the target saw it."""
        self._rejected(str(code)).inc()

    def http(self, route: str, method: str, status: int) -> None:
        """An HTTP answer; `route` is the route's pattern, never the path that a client sent."""
        self._http(route, method if method in METHODS else OTHER, f"{status // 100}xx").inc()

    def render(self, accept: str = "") -> Rendered:
        """All samples now, in OpenMetrics where the Accept header asks for it. Takes milliseconds; any thread may."""
        if "application/openmetrics-text" in accept:
            # Its default escaping makes vllm_ of vllm:, which OpenMetrics allows as it is.
            body = openmetrics.generate_latest(self._registry, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
            return Rendered(body, openmetrics.CONTENT_TYPE_LATEST)
        return Rendered(generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4)


class StepMetrics:
    def __init__(self, families: Families) -> None:
        seconds = families.histograms("pilotfish_step_seconds", "A step's parts.", PARTS, "part")
        self._seconds = [seconds(part) for part in STEP_PARTS]
        self._exposed = families.counter("pilotfish_exposed_wait_seconds", "Time that steps waited for drafts.")
        self._computed = families.counter("pilotfish_rows_computed", "Rows of all forwards.")
        self._rejected = families.counter("pilotfish_rows_rejected", "Rows of tree nodes that were not accepted.")
        self._hits = families.counter("pilotfish_hits", "Sequences whose bonus token was in a tree that lives on.")
        self._misses = families.counter("pilotfish_misses", "Sequences that sampled and had no hit.")
        self._accepted = families.counters(
            "pilotfish_accepted_tokens", "Accepted nodes, by who guessed them.", "origin"
        )

    def progress(self, step: StepReport, deltas: Sequence[Delta]) -> None:
        parts = (step.draft, step.forward + step.verify, step.coordination)
        for histogram, seconds in zip(self._seconds, parts, strict=True):
            histogram.observe(seconds)
        self._exposed.inc(step.draft)
        self._computed.inc(step.rows)
        self._rejected.inc(step.nodes - step.accepted)
        self._hits.inc(step.hits)
        self._misses.inc(step.sequences - step.hits)
        origins = Counter(origin for delta in deltas for verified in delta.verified for origin in verified.origins)
        for origin, count in origins.items():
            self._accepted(origin).inc(count)


class PoolMetrics:
    """The draft pools in the target's last status: their load, and what was dropped of their messages."""

    def __init__(self, families: Families) -> None:
        self._labels = families.values
        self._gauges = [
            families.gauge_family(f"pilotfish_pool_{name}", documentation, "pool")
            for name, documentation in POOL_GAUGES.items()
        ]
        self._drops = families.counters(
            "pilotfish_pool_drops", "What the target dropped of its messages.", "pool", "reason"
        )
        self._totals: dict[tuple[str, str], Total] = {}

    def set(self, pools: Sequence[PoolLoad]) -> None:
        """Pools that are not there any more leave no gauge; what was counted stays."""
        for gauge in self._gauges:
            gauge.clear()
        for pool in pools:
            values = (pool.ready, pool.sessions, pool.free_slots, pool.step_ms / 1000, pool.queue_ms / 1000)
            for gauge, value in zip(self._gauges, values, strict=True):
                gauge.labels(*self._labels, pool.name).set(value)
            for reason, count in pool.drops.items():
                self._totals.setdefault((pool.name, reason), Total(self._drops(pool.name, reason))).set(count)


class Tags:
    """The first MAX_TAGS tags are labels of their own."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def label(self, tag: str | None) -> str:
        if tag is None:
            return NO_TAG
        if len(self._known) < MAX_TAGS:
            self._known.add(tag)
        return tag if tag in self._known else OTHER


class RequestMetrics:
    """Requests by tag, speculation mode and kind of output, counted when they end."""

    def __init__(self, families: Families) -> None:
        self.in_flight = families.gauge("pilotfish_requests_in_flight", "Requests between submission and end.")
        labels = ("tag", "mode", "output")
        self._ended = families.counters("pilotfish_requests", "Requests that ended.", *labels, "finished_reason")
        self._tokens = families.counters("pilotfish_request_tokens", "Tokens of them.", *labels, "kind")
        self._rate = families.histograms(
            "pilotfish_acceptance_rate", "Accepted share of a request's tree nodes.", SHARES, *labels
        )
        self._length = families.histograms(
            "pilotfish_accepted_tokens_per_verify_step",
            "Mean over a request's verify steps, without the target's own token.",
            LENGTHS,
            *labels,
        )
        self._per_token = families.histograms(
            "pilotfish_time_per_output_token_seconds", "Decode time for each token after the first.", PER_TOKEN, *labels
        )
        self._tags = Tags()

    def finished(self, record: RequestRecord) -> None:
        self.in_flight.dec()
        labels = (self._tags.label(record.facts.tag), record.facts.mode, record.facts.output)
        self._ended(*labels, record.reason).inc()
        self._tokens(*labels, "prompt").inc(record.facts.prompt_tokens)
        self._tokens(*labels, "generation").inc(record.generation_tokens)
        if record.verify_steps:
            self._rate(*labels).observe(record.accepted / record.drafted)
            self._length(*labels).observe(record.accepted / record.verify_steps)
        if (seconds := record.time_per_output_token) is not None:
            self._per_token(*labels).observe(seconds)
