"""Metrics have vLLM's names, labels and meanings, for dashboards and benchmark clients; those that vLLM lacks begin
with `pilotfish_`. `metrics.toml` declares them, `docs/metrics.md` describes them."""

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from pilotfish.core.cache.tiers import DEVICE
from pilotfish.core.prefilling.handover import WHOLE, HandOverReport
from pilotfish.wire.serving import Delta, StepReport, Verified

DECLARATIONS = Path(__file__).with_name("metrics.toml")
DECLARED: dict[str, Any] = tomllib.loads(DECLARATIONS.read_text("utf-8"))
KINDS: dict[str, Any] = {name.lower(): getattr(prometheus_client, name) for name in ("Counter", "Gauge", "Histogram")}
ENGINE = "0"
#: Distinct tags of one server, whatever clients send; requests with further ones count as OTHER.
MAX_TAGS = 32
NO_TAG, OTHER = "none", "other"
#: Tokens of a prompt whose KV a prefill worker computed, and those whose KV was nowhere.
PREFILL, COMPUTED = "prefill", "computed"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class ServerMetrics(dict[str | tuple[str, ...], Any]):
    """Keys are names, or names with the values of their own labels. Each server of a process has its own registry."""

    def __init__(self, model_name: str) -> None:
        super().__init__()
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._of_requests: list[tuple[str, bool, attrgetter[Any]]] = []  # name, whether it has labels, what it observes
        self._model_name = model_name
        self._families: dict[str, tuple[Any, tuple[str, ...]]] = {}  # with the values of the labels that all have
        self._tags: set[str] = set()
        for name, family in DECLARED.items():
            if name != "buckets":
                self._declare(name, family, DECLARED["buckets"])

    def __missing__(self, key: str | tuple[str, ...]) -> Any:
        name, *values = (key,) if isinstance(key, str) else key
        family, first = self._families[name]
        metric = self[key] = family.labels(*first, *values)
        return metric

    def empty(self, *names: str) -> None:
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
            self._of_requests.append((name, bool(labels), attrgetter(family["record"])))

    def progress(self, step: StepReport, deltas: Sequence[Delta]) -> None:
        self["pilotfish_step_seconds", "proposal"].observe(step.draft)
        self["pilotfish_step_seconds", "verify"].observe(step.forward + step.verify)
        self["pilotfish_step_seconds", "coordination"].observe(step.coordination)
        self["pilotfish_exposed_wait_seconds"].inc(step.draft)
        self["pilotfish_rows_computed"].inc(step.rows)
        self["pilotfish_rows_rejected"].inc(step.nodes - step.accepted)
        self["pilotfish_hits"].inc(step.hits)
        self["pilotfish_misses"].inc(step.sequences - step.hits)
        self["vllm:generation_tokens"].inc(sum(len(delta.tokens) for delta in deltas))
        if tokens := step.rows - step.nodes + step.accepted:
            self["vllm:iteration_tokens_total"].observe(tokens)
        trees = [verified for delta in deltas for verified in delta.verified if verified.nodes]
        if trees:
            self._count_trees(trees)

    def _count_trees(self, trees: Sequence[Verified]) -> None:
        """As in vLLM, a draft is one sequence's tree in one step."""
        accepted = [tree.accepted for tree in trees]
        self["vllm:spec_decode_num_drafts"].inc(len(trees))
        self["vllm:spec_decode_num_draft_tokens"].inc(sum(tree.nodes for tree in trees))
        self["vllm:spec_decode_num_accepted_tokens"].inc(sum(accepted))
        for position in range(max(accepted)):
            count = sum(length > position for length in accepted)
            self["vllm:spec_decode_num_accepted_tokens_per_pos", str(position)].inc(count)
        for origin, count in Counter(origin for tree in trees for origin in tree.origins).items():
            self["pilotfish_accepted_tokens", origin].inc(count)

    def prefix(self, tokens: int, cached: Mapping[str, int], handed_over: int = 0) -> None:
        """`cached`: tokens whose KV was there, by tier. A sequence that began twice may have found handed-over KV."""
        found, device = sum(cached.values()), cached.get(DEVICE, 0)
        self["vllm:prefix_cache_queries"].inc(tokens)
        self["vllm:prefix_cache_hits"].inc(device)
        self["vllm:external_prefix_cache_queries"].inc(tokens - device)
        self["vllm:external_prefix_cache_hits"].inc(found - device)
        came = min(handed_over, tokens - found)
        for source, count in {**cached, PREFILL: came, COMPUTED: tokens - found - came}.items():
            self["pilotfish_kv_prompt_tokens", source].inc(count)

    def handover(self, report: HandOverReport) -> None:
        of_whole = ("queued", "computing", "exposed") if report.told else ()
        for part in of_whole if report.outcome == WHOLE else ("lost",):
            self["pilotfish_handover_seconds", report.pool, part].observe(getattr(report, part))

    def observe_ended(self, record: object, labels: Sequence[str]) -> None:
        for name, labelled, observed in self._of_requests:
            if (value := observed(record)) is not None:
                self[(name, *labels) if labelled else name].observe(value)

    def label(self, tag: str | None) -> str:
        if tag is None:
            return NO_TAG
        if len(self._tags) < MAX_TAGS:
            self._tags.add(tag)
        return tag if tag in self._tags else OTHER

    def http(self, route: str, method: str, status: int) -> None:
        """`route` is the route's pattern, never the path that a client sent."""
        self["http_requests", route, method if method in METHODS else OTHER, f"{status // 100}xx"].inc()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The body and its Content-Type: OpenMetrics if `accept` asks for it. Takes milliseconds; thread-safe."""
        if "application/openmetrics-text" in accept:
            # Its default escaping makes vllm_ of vllm:, which OpenMetrics allows as it is.
            body = openmetrics.generate_latest(self.registry, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
            return body, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4
