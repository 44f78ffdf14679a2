"""Spans of requests, read back from memory and from a collector that listens."""

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from support import running

from pilotfish.core.prefilling.handover import HandOverReport
from pilotfish.core.scheduling.request import FinishReason
from pilotfish.errors import ParameterError
from pilotfish.server.application import start_tracing, traces_url
from pilotfish.server.http_errors import HttpError
from pilotfish.server.observe import tracing
from pilotfish.server.observe.metrics import ServerMetrics
from pilotfish.server.observe.request_records import RequestFacts, RequestRecord
from pilotfish.server.observe.tracing import Tracer
from pilotfish.wire.serving import Delta, Finish, Verified

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
FACTS = RequestFacts(prompts=(7,), n=2, max_tokens=32, mode="async", streaming=True, tag="search", client="me")


def ended() -> RequestRecord:
    """A request of two outputs, 5 tokens and 4, of three trees of 8 nodes."""
    record, finish = RequestRecord(ServerMetrics("a-model"), FACTS, arrived=10.0), Finish(FinishReason.STOP, None)
    first = [Verified(1.0, 3, 8, 3, ["lm", "lm", "ngram"]), Verified(1.5, 2, 8, 1, ["lm"])]
    second = [Verified(1.5, 4, 8, 2, ["lm", "ngram"])]
    record.update(0, Delta("r", 0, [0] * 5, "", [0] * 5, first, queued=0.5, finish=finish), now=11.0)
    record.update(1, Delta("r", 1, [0] * 4, "", [0] * 4, second, finish=finish), now=13.5)
    record.finish(now=14.0)
    return record


RECORD = ended()


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> Tracer:
    return Tracer(exporter, "a-model")


def only(tracer: Tracer, exporter: InMemorySpanExporter) -> ReadableSpan:
    tracer.close()
    (span,) = exporter.get_finished_spans()
    return span


def delta(*trees: tuple[int, int]) -> Delta:
    return Delta("r", 1, [], "", [], [Verified(2.5, accepted + 1, nodes, accepted) for nodes, accepted in trees])


def test_a_span_says_what_was_asked_and_what_came(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    tracer.request("chat", "req-1", {}).closed(RECORD)
    span = only(tracer, exporter)
    assert (span.name, span.kind, span.parent) == ("chat a-model", SpanKind.SERVER, None)
    assert span.status.status_code is StatusCode.UNSET
    assert span.resource.attributes["service.name"] == "pilotfish"
    asked = {"id": "req-1", "model": "a-model", "max_tokens": 32, "choice.count": 2, "n": 2, "stream": True}
    usage = {"input_tokens": 7, "prompt_tokens": 7, "output_tokens": 9, "completion_tokens": 9, "num_sequences": 2}
    latency = {"e2e": 4.0, "time_to_first_token": 1.0, "time_in_queue": 0.5, "time_in_model_prefill": 0.5}
    latency |= {"time_in_model_decode": 2.5, "time_in_model_inference": 3.0}
    ours = {"mode": "async", "tag": "search", "client": "me", "variant": "default", "verify_steps": 3}
    ours |= {"drafted": 24, "accepted": 6, "accepted.lm": 4, "accepted.ngram": 2}
    parts = {"gen_ai.request": asked, "gen_ai.usage": usage, "gen_ai.latency": latency, "pilotfish": ours}
    assert dict(span.attributes or {}) == {
        **{f"{part}.{name}": fact for part, facts in parts.items() for name, fact in facts.items()},
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "pilotfish",
        "gen_ai.response.model": "a-model",
        "gen_ai.response.finish_reasons": ("stop",),
        "http.response.status_code": 200,
    }


def test_an_event_for_each_verify_step(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    span = tracer.request("completion", "req-1", {})
    span.update(0, delta((8, 3), (0, 0)))  # the second had no tree
    span.update(0, delta((5, 0)))
    span.closed(RECORD)
    events = only(tracer, exporter).events
    assert [event.name for event in events] == ["verify", "verify"]
    attributes = {"output": 0, "at": 2.5, "nodes": 8, "accepted": 3, "tokens": 4}
    assert dict(events[0].attributes or {}) == {f"pilotfish.{name}": value for name, value in attributes.items()}


def test_spans_of_hand_overs(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    """One pool was lost; another one computed when the request began again: the first segment came while it did."""
    now = time.perf_counter()
    lost = HandOverReport("west", "tcp", "gone", began=now - 5, seconds=1.0)
    whole = HandOverReport("east", "shm", "whole", now - 3, 2.0, 0.5, 1.25, 0.75, 0.875, 0.625, 4096, 6, cached=2)
    span = tracer.request("chat", "req-1", {})
    span.update(1, Delta("r", 1, [], "", [], [], handovers=[lost, whole]))
    span.closed(RECORD)
    tracer.close()
    first, second, *parts, request = sorted(exporter.get_finished_spans(), key=outermost)
    assert [times(one, first) for one in (first, second)] == [(0.0, 1.0), (2.0, 4.0)]
    assert abs(time.time() - 5 - (first.start_time or 0) / 1e9) < 60  # it is that of the world
    assert first.parent == second.parent == request.context
    facts = {"output": 1, "pool": "east", "transport": "shm", "outcome": "whole", "tokens": 6, "cached": 2}
    assert dict(second.attributes or {}) == {f"pilotfish.{name}": fact for name, fact in facts.items()}
    assert {part.name: times(part, second) for part in parts} == {
        "queue": (0.0, 0.5),
        "prefill": (0.5, 1.75),
        "transfer": (0.75, 2.0),
    }
    assert all(part.parent == second.context for part in parts)
    (transfer,) = [dict(part.attributes or {}) for part in parts if part.name == "transfer"]
    facts = {"size": 4096, "seconds": 0.875, "hidden": 0.625, "exposed": 0.25}
    assert transfer == {f"pilotfish.{name}": fact for name, fact in facts.items()}


def outermost(span: ReadableSpan) -> tuple[int, int]:
    """Hand-overs by time, then their parts, then requests."""
    order = {"handover": 0, "queue": 1, "prefill": 1, "transfer": 1}
    return order.get(span.name, 2), span.start_time or 0


def times(span: ReadableSpan, since: ReadableSpan) -> tuple[float, float]:
    """Milliseconds precise, from the other's beginning to its own, and to its end."""
    begin, end = (round((at or 0) / 1e9 - (since.start_time or 0) / 1e9, 3) for at in (span.start_time, span.end_time))
    return begin, end


def test_events_are_bounded_and_the_rest_counted(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    span = tracer.request("chat", "req-1", {})
    for accepted in range(tracing.MAX_EVENTS + 40):
        span.update(0, delta((1000, accepted)))
    span.closed(RECORD)
    ended = only(tracer, exporter)
    accepted = [(event.attributes or {})["pilotfish.accepted"] for event in ended.events]
    assert accepted == list(range(tracing.MAX_EVENTS))
    assert (ended.attributes or {})["pilotfish.verify_steps.without_event"] == 40


def test_the_callers_trace_goes_on(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    tracer.request("chat", "req-1", {"traceparent": f"00-{TRACE}-{PARENT}-01"}).closed(RECORD)
    span = only(tracer, exporter)
    assert span.context is not None and f"{span.context.trace_id:032x}" == TRACE
    assert span.parent is not None and f"{span.parent.span_id:016x}" == PARENT


def test_a_trace_that_is_not_sampled_is_not_recorded(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    span = tracer.request("chat", "req-1", {"traceparent": f"00-{TRACE}-{PARENT}-00"})
    span.update(0, delta((8, 3)))
    span.closed(RECORD)
    tracer.close()
    assert exporter.get_finished_spans() == ()


@pytest.mark.parametrize("header", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", "00-\n-x-01"])
def test_a_broken_traceparent_begins_a_trace(tracer: Tracer, exporter: InMemorySpanExporter, header: str) -> None:
    tracer.request("chat", "req-1", {"traceparent": header}).closed(RECORD)
    assert only(tracer, exporter).parent is None


@pytest.mark.parametrize(("status", "expected"), [(429, StatusCode.UNSET), (503, StatusCode.ERROR)])
def test_a_refused_request(tracer: Tracer, exporter: InMemorySpanExporter, status: int, expected: StatusCode) -> None:
    record = ended()
    record.error = HttpError(status, "no")
    tracer.request("chat", "req-1", {}).closed(record)
    span = only(tracer, exporter)
    assert span.status.status_code is expected
    assert (span.attributes or {})["http.response.status_code"] == status


class Collector(HTTPServer):
    """Answers OTLP/HTTP, and keeps what came."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.posts: list[tuple[str, bytes]] = []


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.posts.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_args: Any) -> None:
        """A test's output is no access log."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server, running(server.serve_forever, server.shutdown):
        yield server


def test_a_collector_gets_the_spans(collector: Collector) -> None:
    tracer = start_tracing(f"http://127.0.0.1:{collector.server_port}", "a-model")
    assert tracer is not None
    tracer.request("chat", "req-1", {}).closed(RECORD)
    tracer.close()
    ((path, body),) = collector.posts
    assert path == "/v1/traces"
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert [span.name for span in resource.scope_spans[0].spans] == ["chat a-model"]


class Stuck(SpanExporter):
    """A collector that takes the connection and never answers."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.answers = threading.Event()
        self.left = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:  # noqa: ARG002
        self.asked.set()
        self.answers.wait()
        self.left.set()
        return SpanExportResult.SUCCESS


def test_a_collector_that_hangs_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="opentelemetry")
    tracer = Tracer(exporter := Stuck(), "a-model")
    for i in range(3000):  # more than the queue holds
        tracer.request("chat", f"req-{i}", {}).closed(RECORD)
    assert exporter.asked.wait(10)
    tracer.request("chat", "req-last", {}).closed(RECORD)
    tracer.close(timeout=0.01)
    assert not exporter.left.is_set()
    exporter.answers.set()


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
        ("https://collector/otlp/v1/traces", "https://collector/otlp/v1/traces"),
    ],
)
def test_the_collectors_url(endpoint: str, expected: str) -> None:
    assert traces_url(endpoint) == expected


@pytest.mark.parametrize(
    "endpoint", ["", "localhost:4317", "grpc://localhost:4317", "http://", "http://[", "http://a:x"]
)
def test_what_is_no_collectors_url(endpoint: str) -> None:
    with pytest.raises(ParameterError, match=r"otlp_traces_endpoint: .* expected an http:// or https:// URL"):
        start_tracing(endpoint, "a-model")


def test_without_traces_a_server_imports_neither_their_library_nor_torch() -> None:
    code = (
        "import sys, pilotfish.server.routes; from pilotfish.server.application import start_tracing;"
        "assert start_tracing(None, 'm') is None;"
        "sys.exit(any(name.startswith(('opentelemetry', 'torch')) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
