"""Authentication and admission: limits of each key, and of one queue.

Admission counts its own requests, because a target's status is up to a second old. It belongs to one event loop and
needs no lock. The target refuses a request that its KV pool could never hold."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from starlette.requests import Request

from pilotfish.config.fields import Mode
from pilotfish.config.server import ServerConfig
from pilotfish.errors import ParameterError
from pilotfish.operate.outcome import NONE, Cohort, context_band, temperature_band
from pilotfish.server.auth import ANONYMOUS, Caller, Keyring
from pilotfish.server.bodies.params import Generation
from pilotfish.server.bodies.requests import GenerationRequest
from pilotfish.server.http_errors import HttpError, retry_after
from pilotfish.server.middleware import state_of
from pilotfish.server.observe.feedback import Feedback
from pilotfish.server.observe.metrics import ServerMetrics
from pilotfish.server.observe.request_records import RequestFacts, RequestFollower, RequestRecord, checked_tag
from pilotfish.server.traffic.canary import ReplayedRequest
from pilotfish.server.traffic.capture import RequestCapture
from pilotfish.server.traffic.rollout import Rollout, VariantChoice
from pilotfish.wire.serving import Identity

if TYPE_CHECKING:  # OpenTelemetry is imported only where requests are traced
    from pilotfish.server.observe.tracing import Tracer

TAG_HEADER = "x-request-tag"
ROUNDING = 1e-6  # rounding error in a bucket's level: an amount that exceeds it by less is there


class TokenBucket:
    """`per_minute` flow in evenly, so that t seconds take at most (1 + t / 60) times as much. None: no limit."""

    def __init__(self, per_minute: int | None, now: float) -> None:
        self.per_minute = per_minute
        self._level = self._capacity = math.inf if per_minute is None else float(per_minute)
        self._at = now

    def seconds(self, amount: int, now: float) -> float:
        self._refill(now)
        missing = amount - self._level
        return 0.0 if missing <= ROUNDING else missing * 60 / self._capacity

    def take(self, amount: int, now: float) -> None:
        """A negative amount is put back."""
        self._refill(now)
        self._level = min(self._level - amount, self._capacity)

    def _refill(self, now: float) -> None:
        if self.per_minute is not None:
            self._level = min(self._level + self.per_minute * (now - self._at) / 60, self._capacity)
        self._at = now


class CompletionRate:
    """Sequences that end per second while there are any: an exponentially weighted mean over half a minute."""

    TIME_CONSTANT = 30.0

    def __init__(self, now: float) -> None:
        self._sum = 0.0  # of ended sequences, weighted by age
        self._weight = 0.0  # of the seconds observed: below 1 at first, which is made up for
        self.at = now  # the seconds from here on are observed

    def observe(self, ended: int, now: float) -> None:
        decay = math.exp((self.at - now) / self.TIME_CONSTANT)
        self._sum = self._sum * decay + ended / self.TIME_CONSTANT
        self._weight = self._weight * decay + 1 - decay
        self.at = now

    def seconds(self, sequences: float, now: float) -> float:
        """Time until `sequences` more have ended, at the observed rate; infinity before any has."""
        self.observe(0, now)
        if sequences == 0:
            return 0.0
        return sequences * self._weight / self._sum if self._sum > 0 else math.inf


class Reservation(RequestFollower):
    """An admitted request's share of the limits. Dropped without `release`, it counts with its whole cost."""

    def __init__(self, settle: Callable[[int | None], None]) -> None:
        self._settle = settle

    def release(self, used_tokens: int | None = None) -> None:
        """The request has ended and used that many tokens of prompt and output; None: its whole cost. Idempotent."""
        settle, self._settle = self._settle, lambda _: None
        settle(used_tokens)

    def closed(self, record: RequestRecord) -> None:
        self.release(record.facts.prompt_tokens + record.generation_tokens)

    def __del__(self) -> None:
        self.release()  # a response whose generator never began runs no `finally` of it


class Admission:
    def __init__(self, limits: ServerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.requests = self.sequences = self.slots = 0  # admitted and not yet ended; `slots` that they can come to use
        self.idle = asyncio.Event()  # set while there are none
        self.idle.set()
        self.closed = False  # whether all are refused, as the server ends
        self._clock = clock
        self._accounts: dict[Caller, _Account] = {}
        self._rate = CompletionRate(clock())

    def admit(self, caller: Caller, facts: RequestFacts, target: Identity) -> Reservation:
        """HttpError 429 or 503 for a request that may be admitted later, ParameterError for one that never can be."""
        now = self._clock()
        account = self._accounts.get(caller) or self._accounts.setdefault(caller, _Account(caller, now))
        if self.closed:
            message = "draining: the server ends once its requests have; another one may follow it"
            headers = retry_after(self._rate.seconds(self.sequences, now))
            raise HttpError(503, message, "service_unavailable", code="draining", headers=headers)
        if caller.max_concurrency is not None and account.running >= caller.max_concurrency:
            message = f"{account.running} requests of this key have not ended; {caller.max_concurrency} are allowed"
            raise _too_many("max_concurrency", message, "concurrency_exceeded", self._rate.seconds(1, now))
        account.check_rates(facts, now)
        if self.requests:  # an idle server admits what its queue could not hold, or would refuse it forever
            self._check_queue(facts, target, now)
        return self._enter(account, facts, now)

    def _check_queue(self, facts: RequestFacts, target: Identity, now: float) -> None:
        limit = self.limits.max_queued_requests
        excess = self.sequences + facts.sequences - target.max_requests - limit
        if excess > 0:
            waiting = max(self.sequences - target.max_requests, 0)
            message = f"{waiting} sequences wait and {facts.sequences} more would; {limit} may"
            seconds = self._rate.seconds(min(excess, self.sequences), now)
            raise _too_many("max_queued_requests", message, "queue_full", seconds)
        limit = self.limits.max_queued_tokens or 4 * target.kv_slots
        excess = self.slots + facts.slots - target.kv_slots - limit
        if excess > 0:
            message = f"{max(self.slots - target.kv_slots, 0)} tokens wait and {facts.slots} more would; {limit} may"
            ends = self.sequences * min(excess / max(self.slots, 1), 1.0)  # sequences of average length
            raise _too_many("max_queued_tokens", message, "queue_full", self._rate.seconds(ends, now))

    def _enter(self, account: _Account, facts: RequestFacts, now: float) -> Reservation:
        if self.requests == 0:
            self._rate.at = now
        self._count(1, account, facts)
        self.idle.clear()
        account.requests.take(1, now)
        account.tokens.take(facts.tokens, now)
        return Reservation(lambda used: self._leave(account, facts, used))

    def _leave(self, account: _Account, facts: RequestFacts, used: int | None) -> None:
        now = self._clock()
        self._count(-1, account, facts)
        if self.requests == 0:
            self.idle.set()
        account.tokens.take(0 if used is None else min(used - facts.tokens, 0), now)
        self._rate.observe(facts.sequences, now)

    def _count(self, sign: int, account: _Account, facts: RequestFacts) -> None:
        account.running += sign
        self.requests += sign
        self.sequences += sign * facts.sequences
        self.slots += sign * facts.slots


class _Account:
    def __init__(self, caller: Caller, now: float) -> None:
        self.running = 0
        self.requests = TokenBucket(caller.requests_per_minute, now)
        self.tokens = TokenBucket(caller.tokens_per_minute, now)

    def check_rates(self, facts: RequestFacts, now: float) -> None:
        """HttpError for a request above the present rates, ParameterError for one that they can never allow."""
        limit = self.tokens.per_minute
        if limit is not None and facts.tokens > limit:
            excess = f"prompts and outputs of {facts.tokens} tokens exceed this key's tokens_per_minute, {limit}"
            raise ParameterError("max_tokens", facts.max_tokens, f"fewer: {excess}")
        rates = (("requests_per_minute", self.requests, 1), ("tokens_per_minute", self.tokens, facts.tokens))
        name, bucket, amount = max(rates, key=lambda rate: rate[1].seconds(rate[2], now))
        if (seconds := bucket.seconds(amount, now)) > 0:
            message = f"this key is allowed {bucket.per_minute}, and {amount} more would exceed that"
            raise _too_many(name, message, "rate_limit_exceeded", seconds)


def _too_many(limit: str, problem: str, code: str, seconds: float) -> HttpError:
    return HttpError(429, f"{limit}: {problem}", "rate_limit_error", code=code, headers=retry_after(seconds))


class RequestGuard:
    def __init__(
        self,
        keys: Keyring,
        admission: Admission,
        metrics: ServerMetrics,
        tracer: Tracer | None = None,
        rollout: Rollout | None = None,
        capture: RequestCapture | None = None,
    ) -> None:
        self.admission, self.metrics, self.feedback = admission, metrics, Feedback(metrics)
        self.rollout = rollout or Rollout(None, metrics)
        self._keys, self._tracer, self._capture = keys, tracer, capture

    def identify(self, request: Request) -> Caller:
        """HttpError 401 for an unknown key. Called before the body is read."""
        caller = self._keys.caller(request.headers.get("authorization"), request.headers.get("x-api-key"))
        if caller is None:
            message = "authorization: a key that this server knows is needed, as Bearer KEY or in x-api-key"
            headers = {"www-authenticate": "Bearer"}
            raise HttpError(401, message, "authentication_error", code="invalid_api_key", headers=headers)
        if TAG_HEADER in request.headers:
            checked_tag(request.headers[TAG_HEADER], TAG_HEADER)
        state_of(request.scope).caller = caller
        return caller

    def identify_admin(self, request: Request) -> None:
        """HttpError 403 without an admin's key. Without keys everybody may, as only this host can connect."""
        caller = self.identify(request)
        if not (caller.admin or caller is ANONYMOUS):
            message = "authorization: a key with admin = true is needed"
            raise HttpError(403, message, "permission_error", code="not_an_admin")

    def admit(self, request: Request, caller: Caller, generation: Generation) -> RequestRecord:
        state, params, target, body = state_of(request.scope), generation.params, generation.target, generation.body
        guesses = cast(Mode, "off" if generation.choice.max_nodes == 0 else target.mode)
        facts = RequestFacts(
            prompts=tuple(len(prompt.tokens) for prompt in generation.prompts),
            max_tokens=params.max_tokens,
            n=params.n,
            mode=guesses if generation.cascade is None else "cascade",
            streaming=bool(body.stream),
            output=body.output,
            tag=request_tag(request, body),
            client=caller.name,
            variant=generation.choice.variant.name,
        )
        reservation = self.admission.admit(caller, facts, target)
        record = state.record = RequestRecord(self.metrics, facts, state.arrived)
        record.cascade = generation.cascade or record.cascade
        self.feedback.remember(caller.name, (state.id, generation.head["id"]), record.served)
        cohort = self._cohort(generation, facts)
        replay = None
        if generation.cascade is None and facts.sequences == 1:
            replay = ReplayedRequest(state.id, facts.variant, generation.prompts[0].tokens, params, ())
        record.followers = [reservation, self.rollout.begin(generation.choice, cohort, record, replay)]
        if generation.cascade is None and self._capture is not None:
            kept = self._capture.begin(caller, facts.tag, request.headers, generation)
            record.followers += [] if kept is None else [kept]
        if self._tracer is not None:
            record.followers.append(self._tracer.request(facts.output, state.id, request.headers))
        return record

    def choose(self, request: Request, caller: Caller, body: GenerationRequest, own: int | None) -> VariantChoice:
        asked = body.speculation
        own_choice = asked is not None and (asked.mode is not None or asked.max_nodes is not None)
        number = state_of(request.scope).id
        return self.rollout.choose(caller.name, number, request_tag(request, body), own, own_choice=own_choice)

    def _cohort(self, generation: Generation, facts: RequestFacts) -> Cohort:
        return Cohort(
            tag=self.metrics.label(facts.tag),
            output=generation.reading.shape,
            temperature=temperature_band(generation.params.temperature),
            context=context_band(max(facts.prompts)),
            script=generation.script,
            client=facts.client or NONE,
        )


def request_tag(request: Request, body: GenerationRequest) -> str | None:
    return request.headers.get(TAG_HEADER) if body.tag is None else checked_tag(body.tag)
