"""Spans follow OpenTelemetry's conventions for generative AI, or vLLM's beyond these: counts, times, never text."""

import threading
import time
import tomllib
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace import Tracer as SpanMaker
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pilotfish.core.prefilling.handover import HandOverReport
from pilotfish.core.scheduling.request import FinishReason
from pilotfish.server.http_errors import CLIENT_GONE, http_error
from pilotfish.server.observe.request_records import OutputKind, RequestFollower, RequestRecord
from pilotfish.wire.serving import Delta, Verified

MAX_EVENTS = 256  # verify steps of a request with an event of their own
#: Seconds that the sending of one batch may take, retries included, before its spans are dropped.
EXPORT_TIMEOUT = 5.0
#: Attributes of a RequestRecord on its span once the request has ended; None is left out.
ATTRIBUTES: dict[str, str] = tomllib.loads(Path(__file__).with_name("spans.toml").read_text("utf-8"))
#: Attributes of the span of a hand-over, and of the event of a verify step.
HANDOVER_FACTS = ("pool", "transport", "outcome", "tokens", "cached")
STEP_FACTS = ("at", "nodes", "accepted", "tokens")


class Tracer:
    """A thread sends spans in batches; when it cannot, they are dropped, and no request waits."""

    def __init__(self, exporter: SpanExporter, model_name: str) -> None:
        self._provider = TracerProvider(
            resource=Resource.create({SERVICE_NAME: "pilotfish"}),
            span_limits=SpanLimits(max_events=MAX_EVENTS),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("pilotfish")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    def request(self, kind: OutputKind, request_id: str, headers: Mapping[str, str]) -> "RequestSpan":
        operation, model = "text_completion" if kind == "completion" else "chat", self._model_name
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "pilotfish",
            "gen_ai.request.id": request_id,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
        }
        context = self._propagator.extract(headers)
        span = self._tracer.start_span(f"{operation} {model}", context, SpanKind.SERVER, attributes)
        return RequestSpan(span, self._tracer)

    def close(self, timeout: float = EXPORT_TIMEOUT) -> None:
        closing = threading.Thread(target=self._provider.shutdown, name="close traces", daemon=True)
        closing.start()
        closing.join(timeout)


class RequestSpan(RequestFollower):
    def __init__(self, span: Span, tracer: SpanMaker) -> None:
        self._span, self._tracer = span, tracer
        self._records = span.is_recording()  # false if the caller's trace is not sampled
        self._events = 0

    def update(self, index: int, delta: Delta) -> None:
        if self._records:
            for verified in delta.verified:
                if verified.nodes:
                    self._event(index, verified)
            for report in delta.handovers:
                self._handover(index, report)

    def closed(self, record: RequestRecord) -> None:
        gone = record.error is not None and record.reason is FinishReason.ABORT
        status = 200 if record.error is None else CLIENT_GONE if gone else http_error(record.error).status
        attributes = {name: attrgetter(of_record)(record) for name, of_record in ATTRIBUTES.items()}
        attributes |= {f"pilotfish.accepted.{origin}": count for origin, count in record.accepted_by_origin.items()}
        attributes |= {"http.response.status_code": status, "gen_ai.response.finish_reasons": (str(record.reason),)}
        self._span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if status >= 500 or record.reason is FinishReason.ERROR:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()

    def _handover(self, index: int, report: HandOverReport) -> None:
        """A span from the order to the end of a hand-over (the pool holds its KV so long), with spans of its parts."""
        began = time.time() + report.began - time.perf_counter()  # the target's clock is this process's too
        facts = {"output": index, **{name: getattr(report, name) for name in HANDOVER_FACTS}}
        computed = report.queued + report.computing
        whole = self._part(self._span, "handover", began, began + report.seconds, facts)
        if report.told:
            self._part(whole, "queue", began, began + report.queued, {})
            self._part(whole, "prefill", began + report.queued, began + computed, {})
        if report.size:
            work = {"size": report.size, "seconds": report.transfer, "hidden": report.hidden, "exposed": report.exposed}
            self._part(whole, "transfer", began + report.arriving, began + report.seconds, work)

    def _part(self, parent: Span, name: str, began: float, ended: float, facts: Mapping[str, Any]) -> Span:
        attributes = {f"pilotfish.{name}": value for name, value in facts.items()}
        start, context = round(1e9 * began), set_span_in_context(parent)
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=start)
        span.end(round(1e9 * ended))
        return span

    def _event(self, index: int, verified: Verified) -> None:
        self._events += 1
        if self._events > MAX_EVENTS:
            self._span.set_attribute("pilotfish.verify_steps.without_event", self._events - MAX_EVENTS)
            return
        facts = {"output": index, **{name: getattr(verified, name) for name in STEP_FACTS}}
        self._span.add_event("verify", {f"pilotfish.{name}": value for name, value in facts.items()})
