"""The metrics of one server, in the text format of Prometheus or OpenMetrics. `docs/metrics.md` describes each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from pilotfish.observe.families import Families
from pilotfish.observe.labels import METHODS, OTHER, status_class
from pilotfish.observe.own_metrics import OwnMetrics
from pilotfish.observe.reports import Delta, Status, Step
from pilotfish.observe.requests import RequestRecord
from pilotfish.observe.vllm_metrics import VllmMetrics


@dataclass(frozen=True)
class Rendered:
    """The body and Content-Type of an answer to a scrape."""

    body: bytes
    content_type: str


class ServerMetrics:
    """Fed by the server in its loop; holds a registry of its own."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._vllm = VllmMetrics(self._registry, model_name)
        self._own = OwnMetrics(self._registry, model_name)
        self._http = Families(self._registry, {}).counter_family(
            "http_requests", "HTTP requests answered.", "handler", "method", "status"
        )

    def progress(self, step: Step, deltas: Sequence[Delta]) -> None:
        """A step of the target, and what it added to the outputs."""
        self._vllm.progress(step, deltas)
        self._own.progress(step, deltas)

    def status(self, status: Status) -> None:
        """The target's newest status."""
        self._vllm.status(status)
        self._own.pools(status.pools)

    def target(self, ready: bool, restarts: int) -> None:
        """Whether the target takes requests, and how often it was started again since the server began."""
        self._own.target(ready, restarts)
        if not ready:
            self._vllm.gone()
            self._own.pools(())

    def started(self) -> None:
        """A request is submitted; `finished` follows, once, however it ends."""
        self._own.started()

    def first_token(self, seconds: float, prompt_tokens: int) -> None:
        """The first token of a request, `seconds` after it arrived."""
        self._vllm.first_token(seconds, prompt_tokens)

    def inter_token(self, seconds: float) -> None:
        """Further tokens of an output, `seconds` after those before."""
        self._vllm.inter_token(seconds)

    def finished(self, record: RequestRecord) -> None:
        """A request that `started` has ended."""
        self._vllm.finished(record)
        self._own.finished(record)

    def rejected(self, code: int) -> None:
        """A request was refused with this HTTP status before the target saw it."""
        self._own.rejected(code)

    def http(self, route: str, method: str, status: int) -> None:
        """An HTTP answer; `route` is the route's pattern, never the path that a client sent."""
        self._http.labels(route, method if method in METHODS else OTHER, status_class(status)).inc()

    def render(self, accept: str = "") -> Rendered:
        """All samples now, in OpenMetrics where the Accept header asks for it. Takes milliseconds; any thread may."""
        if "application/openmetrics-text" in accept:
            # Its default escaping makes vllm_ of vllm:, which OpenMetrics allows as it is.
            body = openmetrics.generate_latest(self._registry, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
            return Rendered(body, openmetrics.CONTENT_TYPE_LATEST)
        return Rendered(generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4)
