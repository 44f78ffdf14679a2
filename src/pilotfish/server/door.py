"""The gate of a real server: keys, then limits; and an account of every request that was let in."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.requests import Request

from pilotfish.config import Mode
from pilotfish.core.request import FinishReason
from pilotfish.errors import TargetUnavailable
from pilotfish.observe.families import checked_tag
from pilotfish.observe.metrics import ServerMetrics
from pilotfish.observe.requests import RequestFacts, RequestMeter, RequestRecord
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
            raise TargetUnavailable(health.reason, health.retry_after)
        identity = health.status.identity
        params = demand.params
        asked = admission.Demand(demand.prompts, params.max_tokens, params.n)
        tag = caller.tag if demand.tag is None else checked_tag(demand.tag)
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
            output="chat" if demand.chat else "completion",
            tag=tag,
            client=caller.client.name,
        )
        meter = RequestMeter(self._metrics, facts, caller.arrived)
        caller.visit = Visit(meter, ticket, self._span(caller, demand), self._clock)
        return caller.visit

    def _span(self, visitor: Visitor, demand: Demand) -> RequestSpan | None:
        if self._tracer is None:
            return None
        return self._tracer.request("chat" if demand.chat else "text_completion", demand.request_id, visitor.headers)


@dataclass
class Visit:
    """A request that was let in; implements Ticket. `record` is there once it is over."""

    meter: RequestMeter
    ticket: admission.Ticket
    span: RequestSpan | None
    clock: Callable[[], float]
    record: RequestRecord | None = None

    def update(self, index: int, update: Update) -> None:
        self.meter.update(index, update.delta, self.clock())
        if self.span is not None:
            self.span.update(index, update.delta)

    def close(self, used_tokens: int, error: Exception | None) -> None:
        self.ticket.release(used_tokens)
        self.record = self.meter.finish(self.clock(), _reason(error))
        if self.span is not None:
            self.span.end(_status(error), self.record)


def _reason(error: Exception | None) -> FinishReason | None:
    if error is None:
        return None
    return FinishReason.ABORT if isinstance(error, ClientGone) else FinishReason.ERROR


def _status(error: Exception | None) -> int:
    if error is None:
        return 200
    return 499 if isinstance(error, ClientGone) else http_error(error).status
