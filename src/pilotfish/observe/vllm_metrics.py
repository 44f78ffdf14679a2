"""Metrics under vLLM's names, labels and meanings, for the dashboards and benchmark clients that read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pilotfish.core.request import FinishReason
from pilotfish.observe.requests import RequestRecord
from pilotfish.wire.serving import Delta, Status, StepReport

#: Seconds. vLLM's buckets, with finer ones below for small models.
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40)
LATENCY = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
#: 1, 2, 5, 10, 20, 50 … up to a million.
TOKENS = [digit * 10**power for power in range(6) for digit in (1, 2, 5)] + [1_000_000]
ENGINE = "0"


class Families:
    """Makes metric families of one registry (a process can hold several servers) whose samples all carry the same first
    labels. `counters` and `histograms` give a function from the values of the further labels to a metric."""

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        self._registry = registry
        self._names = tuple(labels)
        self.values = tuple(labels.values())

    def counter(self, name: str, documentation: str) -> Counter:
        return self.counters(name, documentation)()

    def counters(self, name: str, documentation: str, *labels: str) -> Callable[..., Counter]:
        family = Counter(name, documentation, (*self._names, *labels), registry=self._registry)
        return partial(family.labels, *self.values)

    def gauge(self, name: str, documentation: str) -> Gauge:
        return self.gauge_family(name, documentation).labels(*self.values)

    def gauge_family(self, name: str, documentation: str, *labels: str) -> Gauge:
        return Gauge(name, documentation, (*self._names, *labels), registry=self._registry)

    def histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
        return self.histograms(name, documentation, buckets)()

    def histograms(
        self, name: str, documentation: str, buckets: Sequence[float], *labels: str
    ) -> Callable[..., Histogram]:
        names = (*self._names, *labels)
        family = Histogram(name, documentation, names, registry=self._registry, buckets=buckets)
        return partial(family.labels, *self.values)


class Total:
    """Feeds a counter with a total that begins at 0 again when the process that counts does."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._last = 0

    def set(self, total: int) -> None:
        self._counter.inc(total - self._last if total >= self._last else total)
        self._last = total


class VllmMetrics:
    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        families = Families(registry, {"model_name": model_name, "engine": ENGINE})
        self._target = TargetMetrics(families)
        self._speculation = SpeculationMetrics(families)
        self._prompt = families.counter("vllm:prompt_tokens", "Prompt tokens of requests that got a first token.")
        self._generation = families.counter("vllm:generation_tokens", "Tokens generated.")
        self._step_tokens = families.histogram(
            "vllm:iteration_tokens_total", "Prompt and generated tokens of one step.", STEP_TOKENS
        )
        self._first_token = families.histogram(
            "vllm:time_to_first_token_seconds", "Time from arrival to the first token.", FIRST_TOKEN
        )
        self._inter_token = families.histogram(
            "vllm:inter_token_latency_seconds", "Time between the steps that gave one output its tokens.", PER_TOKEN
        )
        self.finished = VllmRequestMetrics(families).finished
        self.status = self._target.status
        self.gone = self._target.gone

    def progress(self, step: StepReport, deltas: Sequence[Delta]) -> None:
        self._generation.inc(sum(len(delta.tokens) for delta in deltas))
        if tokens := step.rows - step.nodes + step.accepted:
            self._step_tokens.observe(tokens)
        self._speculation.verified(deltas)

    def first_token(self, seconds: float, prompt_tokens: int) -> None:
        self._first_token.observe(seconds)
        self._prompt.inc(prompt_tokens)

    def inter_token(self, seconds: float) -> None:
        self._inter_token.observe(seconds)


class TargetMetrics:
    """The target as of its last status."""

    def __init__(self, families: Families) -> None:
        self._running = families.gauge("vllm:num_requests_running", "Sequences that run.")
        self._waiting = families.gauge("vllm:num_requests_waiting", "Sequences that wait for KV slots or a place.")
        self._usage = families.gauge("vllm:kv_cache_usage_perc", "Used share of the KV slots; 1 means all.")
        self._preemptions = Total(families.counter("vllm:num_preemptions", "Sequences that lost their KV."))
        self._config = families.gauge_family(
            "vllm:cache_config_info", "The KV pool; a block is one slot.", "block_size", "num_gpu_blocks", "cache_dtype"
        )
        self._labels = families.values
        self._told: tuple[str, ...] = ()

    def status(self, status: Status) -> None:
        slots = status.identity.kv_slots
        self._running.set(status.running)
        self._waiting.set(status.waiting)
        self._usage.set(1 - status.free_slots / slots)
        self._preemptions.set(status.preemptions)
        config = (*self._labels, "1", str(slots), status.identity.dtype)
        if config != self._told:  # a scrape in another thread should find the gauge
            self._config.clear()
            self._config.labels(*config).set(1)
            self._told = config

    def gone(self) -> None:
        """The target has ended, and what it held with it."""
        for gauge in (self._running, self._waiting, self._usage):
            gauge.set(0)


class SpeculationMetrics:
    """The four counters of speculative decoding. A draft is one sequence's tree in one step."""

    def __init__(self, families: Families) -> None:
        self._drafts = families.counter("vllm:spec_decode_num_drafts", "Trees verified.")
        self._nodes = families.counter("vllm:spec_decode_num_draft_tokens", "Nodes of these trees.")
        self._accepted = families.counter("vllm:spec_decode_num_accepted_tokens", "Nodes accepted.")
        self._per_position = families.counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Nodes accepted at each depth, from 0.", "position"
        )
        self._positions: list[Counter] = []  # as many as the deepest acceptance so far, which the tree's size bounds

    def verified(self, deltas: Sequence[Delta]) -> None:
        trees = [verified for delta in deltas for verified in delta.verified if verified.nodes]
        if trees:
            accepted = [tree.accepted for tree in trees]
            self._drafts.inc(len(trees))
            self._nodes.inc(sum(tree.nodes for tree in trees))
            self._accepted.inc(sum(accepted))
            self._count_positions(accepted)

    def _count_positions(self, accepted: list[int]) -> None:
        for position in range(max(accepted)):
            if position == len(self._positions):
                self._positions.append(self._per_position(str(position)))
            self._positions[position].inc(sum(length > position for length in accepted))


class VllmRequestMetrics:
    """Sizes, parameters and times of requests, counted when they end."""

    def __init__(self, families: Families) -> None:
        success = families.counters("vllm:request_success", "Requests that ended, by how.", "finished_reason")
        self._success = {reason: success(reason) for reason in FinishReason}  # all exist from the start, at 0
        self._queries = families.counter("vllm:prefix_cache_queries", "Prompt tokens looked up in a prefix cache.")
        self._hits = families.counter("vllm:prefix_cache_hits", "Prompt tokens found in a prefix cache.")
        # By the property of a RequestRecord that each one observes.
        self._seconds = {
            name: families.histogram(f"vllm:{metric}_seconds", documentation, buckets)
            for name, metric, documentation, buckets in (
                ("latency", "e2e_request_latency", "Time from arrival to the end.", LATENCY),
                ("queued", "request_queue_time", "Time from submission to the first row in a step.", LATENCY),
                ("inference", "request_inference_time", "Time from the first row to the last token.", LATENCY),
                ("prefill", "request_prefill_time", "Time from the first row to the first token.", LATENCY),
                ("decode", "request_decode_time", "Time from the first token to the last.", LATENCY),
                (
                    "time_per_output_token",
                    "request_time_per_output_token",
                    "Decode time for each token after the first.",
                    PER_TOKEN,
                ),
            )
        }
        self._prompt = families.histogram("vllm:request_prompt_tokens", "Prompt tokens.", TOKENS)
        self._generation = families.histogram("vllm:request_generation_tokens", "Tokens of all outputs.", TOKENS)
        self._longest = families.histogram("vllm:request_max_num_generation_tokens", "Of the longest output.", TOKENS)
        self._n = families.histogram("vllm:request_params_n", "Parameter n.", (1, 2, 5, 10, 20))
        self._max_tokens = families.histogram("vllm:request_params_max_tokens", "Parameter max_tokens.", TOKENS)

    def finished(self, record: RequestRecord) -> None:
        self._success[record.reason].inc()
        for name, histogram in self._seconds.items():
            if (seconds := getattr(record, name)) is not None:
                histogram.observe(seconds)
        self._prompt.observe(record.facts.prompt_tokens)
        self._generation.observe(record.generation_tokens)
        self._longest.observe(record.longest)
        self._n.observe(record.facts.n)
        if record.facts.max_tokens is not None:
            self._max_tokens.observe(record.facts.max_tokens)
        if record.facts.cached_tokens is not None:
            self._queries.inc(record.facts.prompt_tokens)
            self._hits.inc(record.facts.cached_tokens)
