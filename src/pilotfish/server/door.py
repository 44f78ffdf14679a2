"""The gate of a real server: keys, then limits; and an account of every request that was let in."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from starlette.requests import Request

from pilotfish.errors import TargetUnavailable
from pilotfish.observe.labels import FinishReason, Mode, checked_tag
from pilotfish.observe.metrics import ServerMetrics
from pilotfish.observe.requests import RequestFacts, RequestRecord
from pilotfish.observe.tracing import RequestSpan, Tracer
from pilotfish.server import admission
from pilotfish.server.admission import Admission, AdmissionError, Capacity
from pilotfish.server.engine import Engine, Update
from pilotfish.server.failures import ClientGone, HttpError, http_error
from pilotfish.server.gate import Caller, Demand
from pilotfish.server.keys import Client, Keyring

TAG_HEADER = "x-request-tag"
VISITOR = "pilotfish.visitor"


@dataclass
class Visitor:
    """Who sent a request, and once it was let in what came of it."""

    client: Client
    tag: str | None
    headers: Mapping[str, str]
    arrived: float
    visit: Visit | None = None

    @property
    def cache_salt(self) -> str | None:
        return self.client.cache_salt


class Door:
    """Implements Gate."""

    def __init__(
        self,
        keys: Keyring,
        limits: Admission,
        engine: Engine,
        metrics: ServerMetrics,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = keys
        self._admission = limits
        self._engine = engine
        self._metrics = metrics
        self._tracer = tracer
        self._clock = clock

    @property
    def closing(self) -> bool:
        return self._admission.closed

    def identify(self, request: Request) -> Visitor:
        client = self._keys.client(request.headers.get("authorization"))
        if client is None:
            message = "authorization: a key that this server knows is needed, as Bearer KEY"
            headers = {"www-authenticate": "Bearer"}
            raise HttpError(401, message, "authentication_error", code="invalid_api_key", headers=headers)
        tag = request.headers.get(TAG_HEADER)
        checked = None if tag is None else checked_tag(tag, TAG_HEADER)
        visitor = request.scope[VISITOR] = Visitor(client, checked, request.headers, self._clock())
        return visitor

    def admit(self, caller: Caller, demand: Demand) -> Visit:
        assert isinstance(caller, Visitor)  # from `identify`
        health = self._engine.health
        if health.status is None:
            raise TargetUnavailable(health.reason)
        identity = health.status.identity
        params = demand.params
        asked = admission.Demand(demand.prompts, params.max_tokens, params.n)
        try:
            capacity = Capacity(identity.max_requests, identity.kv_slots)
            ticket = self._admission.admit(caller.client, asked, capacity)
        except AdmissionError as error:
            kind = "rate_limit_error" if error.status == 429 else "service_unavailable"
            headers = {"retry-after": str(error.retry_after)}
            raise HttpError(error.status, str(error), kind, code=error.code, headers=headers) from error
        mode: Mode = "off" if demand.max_nodes == 0 else identity.mode  # type: ignore[assignment]  # it is one of them
        facts = RequestFacts(
            prompt_tokens=sum(demand.prompts),
            n=asked.sequences,
            max_tokens=params.max_tokens,
            mode=mode,
            streaming=demand.stream,
            tag=caller.tag,
            client=caller.client.name,
        )
        caller.visit = Visit(facts, caller.arrived, ticket, self._metrics, self._span(caller, demand), self._clock)
        return caller.visit

    def _span(self, visitor: Visitor, demand: Demand) -> RequestSpan | None:
        if self._tracer is None:
            return None
        operation = "chat" if demand.chat else "text_completion"
        return self._tracer.request(operation, demand.request_id, visitor.headers)


@dataclass
class _Output:
    """What an output has given."""

    tokens: int = 0
    last: float | None = None  # when the newest of them came


@dataclass
class Visit:
    """A request that was let in; implements Ticket. `record` is there once it is over."""

    facts: RequestFacts
    arrived: float
    ticket: admission.Ticket
    metrics: ServerMetrics
    span: RequestSpan | None
    clock: Callable[[], float]
    record: RequestRecord | None = None
    _outputs: dict[tuple[int, int], _Output] = field(default_factory=dict)  # by request at the engine, and index
    _reasons: list[str] = field(default_factory=list)
    _first: float | None = None
    _queued: float | None = None
    _steps: int = 0
    _drafted: int = 0
    _accepted: int = 0

    def __post_init__(self) -> None:
        self.metrics.started()

    def update(self, update: Update) -> None:
        delta, now = update.delta, self.clock()
        if self._queued is None:
            self._queued = delta.queued
        if delta.tokens:
            self._count(self._outputs.setdefault((delta.id, delta.index), _Output()), len(delta.tokens), now)
        for verified in delta.verified:
            self._steps += verified.nodes > 0
            self._drafted += verified.nodes
            self._accepted += verified.accepted
        if delta.finish is not None:
            self._reasons.append(delta.finish.reason)
        if self.span is not None:
            self.span.update(delta)

    def _count(self, output: _Output, tokens: int, now: float) -> None:
        if self._first is None:
            self._first = now
            self.metrics.first_token(now - self.arrived, self.facts.prompt_tokens)
        elif output.last is not None:
            self.metrics.inter_token(now - output.last)
        output.tokens += tokens
        output.last = now

    def close(self, used_tokens: int, error: Exception | None) -> None:
        self.ticket.release(used_tokens)
        self.record = self._recorded(error)
        self.metrics.finished(self.record)
        if self.span is not None:
            self.span.end(_status(error), self.record)

    def _recorded(self, error: Exception | None) -> RequestRecord:
        moments = [output.last for output in self._outputs.values() if output.last is not None]
        return RequestRecord(
            facts=self.facts,
            reason=self._reason(error),
            arrived=self.arrived,
            ended=self.clock(),
            queued=self._queued,
            first_token=self._first,
            last_token=max(moments, default=None),
            generation_tokens=sum(output.tokens for output in self._outputs.values()),
            longest=max((output.tokens for output in self._outputs.values()), default=0),
            verify_steps=self._steps,
            drafted=self._drafted,
            accepted=self._accepted,
        )

    def _reason(self, error: Exception | None) -> FinishReason:
        """Of several outputs, that one was cut off counts most."""
        if error is not None:
            return "abort" if isinstance(error, ClientGone) else "error"
        return "length" if "length" in self._reasons else "stop"


def _status(error: Exception | None) -> int:
    if error is None:
        return 200
    return 499 if isinstance(error, ClientGone) else http_error(error).status
