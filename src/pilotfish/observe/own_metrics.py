"""Metrics that vLLM has no name for, under `pilotfish_`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from pilotfish.observe.families import Families, Total
from pilotfish.observe.labels import Tags
from pilotfish.observe.reports import Delta, Pool, Step
from pilotfish.observe.requests import RequestRecord

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


class OwnMetrics:
    """What a server feeds in; `registry` renders it."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        families = Families(registry, {"model_name": model_name})
        self._steps = Steps(families)
        self._pools = Pools(families, model_name)
        self._requests = OwnRequests(families, model_name)
        self._in_flight = families.gauge("pilotfish_requests_in_flight", "Requests between submission and end.")
        self._ready = families.gauge("pilotfish_target_ready", "1: the target takes requests.")
        self._restarts = Total(families.counter("pilotfish_target_restarts", "Starts of the target after its first."))
        self._rejected = families.counter_family(
            "pilotfish_requests_rejected", "Requests refused before a target saw them, by HTTP status.", "code"
        )
        self._model_name = model_name
        self._origins = families.counter_family(
            "pilotfish_accepted_tokens", "Accepted nodes, by who guessed them.", "origin"
        )
        self.pools = self._pools.set

    def progress(self, step: Step, deltas: Sequence[Delta]) -> None:
        self._steps.progress(step)
        origins = Counter(origin for delta in deltas for verified in delta.verified for origin in verified.origins)
        for origin, count in origins.items():
            self._origins.labels(self._model_name, origin).inc(count)

    def started(self) -> None:
        self._in_flight.inc()

    def finished(self, record: RequestRecord) -> None:
        self._in_flight.dec()
        self._requests.finished(record)

    def rejected(self, code: int) -> None:
        self._rejected.labels(self._model_name, str(code)).inc()

    def target(self, ready: bool, restarts: int) -> None:
        self._ready.set(ready)
        self._restarts.set(restarts)


class Steps:
    """Where the target's time and rows go."""

    def __init__(self, families: Families) -> None:
        seconds = families.histogram_family("pilotfish_step_seconds", "A step's parts.", PARTS, "part")
        self._seconds = [seconds.labels(*families.values, part) for part in STEP_PARTS]
        self._exposed = families.counter("pilotfish_exposed_wait_seconds", "Time that steps waited for drafts.")
        self._computed = families.counter("pilotfish_rows_computed", "Rows of all forwards.")
        self._rejected = families.counter("pilotfish_rows_rejected", "Rows of tree nodes that were not accepted.")
        self._hits = families.counter("pilotfish_hits", "Sequences whose bonus token was in a tree that lives on.")
        self._misses = families.counter("pilotfish_misses", "Sequences that sampled and had no hit.")

    def progress(self, step: Step) -> None:
        parts = (step.draft, step.forward + step.verify, step.coordination)
        for histogram, seconds in zip(self._seconds, parts, strict=True):
            histogram.observe(seconds)
        self._exposed.inc(step.draft)
        self._computed.inc(step.rows)
        self._rejected.inc(step.nodes - step.accepted)
        self._hits.inc(step.hits)
        self._misses.inc(step.sequences - step.hits)


class Pools:
    """The draft pools in the target's last status: their load, and what was dropped of their messages."""

    def __init__(self, families: Families, model_name: str) -> None:
        self._gauges = {
            name: families.gauge_family(f"pilotfish_pool_{name}", documentation, "pool")
            for name, documentation in POOL_GAUGES.items()
        }
        self._drops = families.counter_family(
            "pilotfish_pool_drops", "What the target dropped of its messages.", "pool", "reason"
        )
        self._totals: dict[tuple[str, str], Total] = {}
        self._model_name = model_name

    def set(self, pools: Sequence[Pool]) -> None:
        """Pools that are not there any more leave no gauge; what was counted stays."""
        for gauge in self._gauges.values():
            gauge.clear()
        for pool in pools:
            values = (pool.ready, pool.sessions, pool.free_slots, pool.step_ms / 1000, pool.queue_ms / 1000)
            for gauge, value in zip(self._gauges.values(), values, strict=True):
                gauge.labels(self._model_name, pool.name).set(value)
            for reason, count in pool.drops.items():
                self._total(pool.name, reason).set(count)

    def _total(self, pool: str, reason: str) -> Total:
        if (pool, reason) not in self._totals:
            self._totals[pool, reason] = Total(self._drops.labels(self._model_name, pool, reason))
        return self._totals[pool, reason]


class OwnRequests:
    """Requests by tag, speculation mode and kind of output, counted when they end."""

    def __init__(self, families: Families, model_name: str) -> None:
        labels = ("tag", "mode", "output")
        self._ended = families.counter_family("pilotfish_requests", "Requests that ended.", *labels, "finished_reason")
        self._tokens = families.counter_family("pilotfish_request_tokens", "Tokens of them.", *labels, "kind")
        self._rate = families.histogram_family(
            "pilotfish_acceptance_rate", "Accepted share of a request's tree nodes.", SHARES, *labels
        )
        self._length = families.histogram_family(
            "pilotfish_accepted_tokens_per_verify_step",
            "Mean over a request's verify steps, without the target's own token.",
            LENGTHS,
            *labels,
        )
        self._per_token = families.histogram_family(
            "pilotfish_time_per_output_token_seconds", "Decode time for each token after the first.", PER_TOKEN, *labels
        )
        self._tags = Tags()
        self._model_name = model_name

    def finished(self, record: RequestRecord) -> None:
        labels = (self._model_name, self._tags.label(record.facts.tag), record.facts.mode, record.facts.output)
        self._ended.labels(*labels, record.reason).inc()
        self._tokens.labels(*labels, "prompt").inc(record.facts.prompt_tokens)
        self._tokens.labels(*labels, "generation").inc(record.generation_tokens)
        if record.verify_steps:
            self._rate.labels(*labels).observe(record.accepted / record.drafted)
            self._length.labels(*labels).observe(record.accepted / record.verify_steps)
        if (seconds := record.time_per_output_token) is not None:
            self._per_token.labels(*labels).observe(seconds)
