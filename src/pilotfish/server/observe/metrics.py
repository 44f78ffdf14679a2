"""The metrics of one server, in the text format of Prometheus or OpenMetrics: under vLLM's names, labels and meanings
for the dashboards and benchmark clients that read them, and under `pilotfish_` those that vLLM has no name for.

`metrics.toml` declares them, `docs/metrics.md` describes each.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from pilotfish.core.cache.tiers import DEVICE
from pilotfish.core.prefilling.handover import WHOLE, HandOverReport
from pilotfish.server.observe.fleet_metrics import FleetMetrics
from pilotfish.server.observe.metric_families import Metrics
from pilotfish.server.observe.request_records import RequestRecord
from pilotfish.wire.serving import Delta, StepReport, Verified

#: Distinct tags of one server, whatever clients send; requests with further ones count as OTHER.
MAX_TAGS = 32
NO_TAG, OTHER = "none", "other"
#: What a guard may do about a variant.
EVENTS = ("cut", "trial", "restored", "failed trial")
#: Of a prompt's tokens, those whose KV a prefill worker computed, and those whose KV was nowhere.
PREFILL, COMPUTED = "prefill", "computed"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class ServerMetrics:
    """The server feeds them in its loop."""

    def __init__(self, model_name: str) -> None:
        self._metrics = Metrics(model_name)
        self._tags: set[str] = set()
        self.fleet = FleetMetrics(self._metrics)

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
        self._count_answer(record, reason)
        self._metrics["pilotfish_request_tokens", *labels, "prompt"].inc(facts.prompt_tokens)
        self._metrics["pilotfish_request_tokens", *labels, "generation"].inc(record.generation_tokens)
        for name, labelled, observed in self._metrics.of_requests:
            if (value := observed(record)) is not None:
                self._metrics[(name, *labels) if labelled else name].observe(value)

    def _count_answer(self, record: RequestRecord, reason: str) -> None:
        """By whoever answers: a variant of speculation, or one of a cascade's models, once it is known which."""
        if record.facts.mode != "cascade":
            self._metrics["pilotfish_variant_requests", record.facts.variant, reason].inc()
        elif (side := record.cascade.side) is not None:
            self._metrics["pilotfish_cascade_requests", side, record.cascade.reason].inc()

    def cascade_ready(self, model: str, ready: bool) -> None:
        """Whether the small model takes requests."""
        self._metrics["pilotfish_cascade_ready", model].set(ready)

    def feedback(self, labels: tuple[str, str], outcome: str, score: float, tokens: int, steps: int) -> None:
        """Of a request of a category and mode, the labels, which had so many `tokens` in so many `steps`."""
        self._metrics["pilotfish_feedback", *labels, outcome].inc()
        self._metrics["pilotfish_feedback_score", *labels].inc(score)
        self._metrics["pilotfish_feedback_tokens", *labels].inc(tokens)
        self._metrics["pilotfish_feedback_steps", *labels].inc(steps)

    # -- variants of speculation, which are few

    def variant_step(self, variant: str, verified: Verified, since: float | None) -> None:
        """A step gave an output tokens, so many seconds after the one before it; None: it was the first."""
        self._metrics["pilotfish_variant_steps", variant].inc()
        self._metrics["pilotfish_variant_accepted_tokens", variant].inc(verified.accepted)
        if since is not None:
            self._metrics["pilotfish_variant_tokens", variant].inc(verified.tokens)
            self._metrics["pilotfish_variant_token_seconds", variant].inc(since)

    def variant_share(self, variant: str, share: float) -> None:
        """Of its requests that may speculate now. Alerts need its events from 0 on."""
        self._metrics["pilotfish_variant_share", variant].set(share)
        for kind in EVENTS:
            self._metrics["pilotfish_variant_events", variant, kind].inc(0)

    def variant_event(self, variant: str, kind: str) -> None:
        """The guard did something about it."""
        self._metrics["pilotfish_variant_events", variant, kind].inc()

    def canary(self, verdict: str) -> None:
        """A request was generated again without speculation."""
        self._metrics["pilotfish_canary_replays", verdict].inc()

    def captured(self, result: str) -> None:
        """A request that was to be kept: kept, dropped or refused. Any thread may say so."""
        self._metrics["pilotfish_captured_requests", result].inc()

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
