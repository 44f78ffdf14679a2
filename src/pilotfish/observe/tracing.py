"""OpenTelemetry spans of requests: semantic conventions for generative AI, and vLLM's names where these have none.

A span holds counts and times, never text of a prompt or an answer.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Literal, TypeAlias

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pilotfish.core.request import FinishReason
from pilotfish.observe.requests import RequestFacts, RequestRecord
from pilotfish.wire.serving import Delta, Verified

Operation: TypeAlias = Literal["chat", "text_completion"]
Attributes: TypeAlias = dict[str, str | bool | int | float]

#: Verify steps of a request with an event of their own.
MAX_EVENTS = 256
#: Seconds that the sending of one batch may take, retries included, before its spans are dropped.
EXPORT_TIMEOUT = 5.0
#: vLLM's names of a record's times, which are seconds.
LATENCIES = {
    "latency": "gen_ai.latency.e2e",
    "time_to_first_token": "gen_ai.latency.time_to_first_token",
    "queued": "gen_ai.latency.time_in_queue",
    "prefill": "gen_ai.latency.time_in_model_prefill",
    "decode": "gen_ai.latency.time_in_model_decode",
    "inference": "gen_ai.latency.time_in_model_inference",
}


class Tracer:
    """Spans of one server. A thread sends them in batches; when it cannot, they are dropped, and no request waits."""

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

    def request(self, operation: Operation, request_id: str, headers: Mapping[str, str]) -> RequestSpan:
        """A span that begins now, in the trace of the request's `traceparent`, if it has one."""
        attributes: Attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "pilotfish",
            "gen_ai.request.id": request_id,
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
        }
        context = self._propagator.extract(headers)
        name = f"{operation} {self._model_name}"
        return RequestSpan(self._tracer.start_span(name, context, SpanKind.SERVER, attributes))

    def close(self, timeout: float = EXPORT_TIMEOUT) -> None:
        """Send what is left; what could not be sent within `timeout` seconds is lost."""
        closing = threading.Thread(target=self._provider.shutdown, name="close traces", daemon=True)
        closing.start()
        closing.join(timeout)


class RequestSpan:
    """A request's span. `end` must be called once, however the request ends."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._records = span.is_recording()  # false if the caller's trace is not sampled
        self._events = 0

    def update(self, index: int, delta: Delta) -> None:
        """Add an event for each verify step in a delta of output `index`."""
        if self._records:
            for verified in delta.verified:
                if verified.nodes:
                    self._event(index, verified)

    def end(self, status: int, record: RequestRecord | None = None) -> None:
        """The request was answered with this HTTP status. It has no record if it was refused before submission."""
        self._span.set_attribute("http.response.status_code", status)
        if record is not None:
            self._span.set_attributes(facts_attributes(record.facts))
            self._span.set_attributes(record_attributes(record))
            self._span.set_attribute("gen_ai.response.finish_reasons", (str(record.reason),))
        if status >= 500 or (record is not None and record.reason is FinishReason.ERROR):
            self._span.set_status(StatusCode.ERROR)
        self._span.end()

    def _event(self, index: int, verified: Verified) -> None:
        self._events += 1
        if self._events > MAX_EVENTS:
            self._span.set_attribute("pilotfish.verify_steps.without_event", self._events - MAX_EVENTS)
            return
        attributes: Attributes = {
            "pilotfish.output": index,
            "pilotfish.at": verified.at,
            "pilotfish.nodes": verified.nodes,
            "pilotfish.accepted": verified.accepted,
            "pilotfish.tokens": verified.tokens,
        }
        self._span.add_event("verify", attributes)


def facts_attributes(facts: RequestFacts) -> Attributes:
    """Attributes of the request; unset parameters are left out."""
    attributes = {
        "gen_ai.request.max_tokens": facts.max_tokens,
        "gen_ai.request.choice.count": facts.n,
        "gen_ai.request.n": facts.n,
        "gen_ai.request.stream": facts.streaming,
        "gen_ai.usage.cache_read.input_tokens": facts.cached_tokens,
        "pilotfish.mode": facts.mode,
        "pilotfish.tag": facts.tag,
        "pilotfish.client": facts.client,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def record_attributes(record: RequestRecord) -> Attributes:
    """Tokens, trees and times; times that the request never reached are left out."""
    counts: Attributes = {
        "gen_ai.usage.input_tokens": record.facts.prompt_tokens,
        "gen_ai.usage.prompt_tokens": record.facts.prompt_tokens,
        "gen_ai.usage.output_tokens": record.generation_tokens,
        "gen_ai.usage.completion_tokens": record.generation_tokens,
        "gen_ai.usage.num_sequences": record.facts.n,
        "pilotfish.verify_steps": record.verify_steps,
        "pilotfish.drafted": record.drafted,
        "pilotfish.accepted": record.accepted,
        **{f"pilotfish.accepted.{origin}": count for origin, count in record.accepted_by_origin.items()},
    }
    times = {attribute: getattr(record, name) for name, attribute in LATENCIES.items()}
    return counts | {attribute: seconds for attribute, seconds in times.items() if seconds is not None}


def otlp_tracer(endpoint: str, model_name: str) -> Tracer:
    """A tracer that sends to the full URL of an OTLP/HTTP collector's traces."""
    return Tracer(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT), model_name)
