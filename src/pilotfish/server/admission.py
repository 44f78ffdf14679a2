"""What is let in, before anything reaches the engine: bounds of each client, and one queue for all.

    admit ──► Ticket ──► release
      │          holds     gives back: concurrency and its place in the queue at once, tokens that were not used
      └─► AdmissionError   429 or 503, and when to come again

The gate counts what it let in itself, exactly: a target's Status is up to a second old. It has one event loop's
thread and needs no lock. A request that the KV pool could never hold is not its matter: the target refuses it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType

from pilotfish.errors import ParameterError, PilotfishError
from pilotfish.options import refuse_unknown
from pilotfish.server.keys import Client
from pilotfish.server.rates import Bucket, Completions, retry_after


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much may wait: `max_queued_requests` sequences beyond those that run at a time, and sequences that can grow
    to `max_queued_tokens` tokens beyond those that the KV pool holds; 0: four times the pool."""

    max_queued_requests: int = 256
    max_queued_tokens: int = 0

    def __post_init__(self) -> None:
        for field, high in (("max_queued_requests", 1 << 20), ("max_queued_tokens", 1 << 40)):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= high:
                raise ParameterError(field, value, f"an integer 0 to {high}")


@dataclass(frozen=True)
class Capacity:
    """What a target serves at a time."""

    max_requests: int  # sequences
    kv_slots: int  # tokens


@dataclass(frozen=True)
class Demand:
    """What a request asks for: `n` outputs of each prompt."""

    prompts: tuple[int, ...]  # tokens of each
    max_tokens: int  # of an output
    n: int = 1

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.n

    @property
    def tokens(self) -> int:
        """That count for `tokens_per_minute`, if all outputs grow as long as they may."""
        return sum(self.prompts) + self.sequences * self.max_tokens

    @property
    def slots(self) -> int:
        """KV slots that its sequences can come to need."""
        return self.n * sum(self.prompts) + self.sequences * self.max_tokens


class AdmissionError(PilotfishError):
    """A request that is not let in now, and could be after `retry_after` seconds. An HTTP status and OpenAI's code."""

    def __init__(self, status: HTTPStatus, code: str, message: str, seconds: float) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after(seconds)


class Ticket:
    """A request that was let in. Whoever drops it without `release` has used all that was asked for."""

    def __init__(self, settle: Callable[[int | None], None]) -> None:
        self._settle: Callable[[int | None], None] | None = settle

    def release(self, used_tokens: int | None = None) -> None:
        """The request has ended, having used that many tokens of prompt and output; None: all it asked for.
        Only the first call counts."""
        settle, self._settle = self._settle, None
        if settle is not None:
            settle(used_tokens)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()  # a response whose generator never began runs no `finally` of it


class Admission:
    """The gate. `clock` gives seconds that never go back."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.requests = 0  # let in and not yet ended, as are
        self.sequences = 0
        self.slots = 0  # that they can come to need
        self.idle = asyncio.Event()  # set while there are none
        self.idle.set()
        self.closed = False
        self._clock = clock
        self._accounts: dict[Client, _Account] = {}
        self._completions = Completions(clock())

    def admit(self, client: Client, demand: Demand, capacity: Capacity) -> Ticket:
        """Let a request in, or raise and take nothing: AdmissionError for what may be let in later, ParameterError for
        what the client's rate can never allow."""
        now = self._clock()
        account = self._account(client, now)
        if self.closed:
            seconds = self._completions.seconds(self.sequences, now)
            message = "draining: the server ends once its requests have; another one may follow it"
            raise AdmissionError(HTTPStatus.SERVICE_UNAVAILABLE, "draining", message, seconds)
        self._check_concurrency(account, now)
        account.check_rates(demand, now)
        self._check_queue(demand, capacity, now)
        return self._enter(account, demand, now)

    def close(self) -> None:
        """Let nobody in any more; `idle` tells when those inside have ended."""
        self.closed = True

    def _account(self, client: Client, now: float) -> _Account:
        if client not in self._accounts:
            self._accounts[client] = _Account(client, now)
        return self._accounts[client]

    def _check_concurrency(self, account: _Account, now: float) -> None:
        limit = account.client.max_concurrency
        if limit is not None and account.running >= limit:
            message = f"max_concurrency: {account.running} requests of this key have not ended; {limit} are allowed"
            raise _too_many("concurrency_exceeded", message, self._completions.seconds(1, now))

    def _check_queue(self, demand: Demand, capacity: Capacity, now: float) -> None:
        """With nobody inside whatever the target can serve is let in: else it would be turned away forever."""
        if self.requests == 0:
            return
        limit = self.limits.max_queued_requests
        excess = self.sequences + demand.sequences - capacity.max_requests - limit
        if excess > 0:
            waiting = max(self.sequences - capacity.max_requests, 0)
            message = f"max_queued_requests: {waiting} sequences wait and {demand.sequences} more would; {limit} may"
            raise _too_many("queue_full", message, self._completions.seconds(min(excess, self.sequences), now))
        limit = self.limits.max_queued_tokens or 4 * capacity.kv_slots
        excess = self.slots + demand.slots - capacity.kv_slots - limit
        if excess > 0:
            waiting = max(self.slots - capacity.kv_slots, 0)
            message = f"max_queued_tokens: {waiting} tokens wait and {demand.slots} more would; {limit} may"
            ends = self.sequences * min(excess / max(self.slots, 1), 1.0)  # sequences of average length
            raise _too_many("queue_full", message, self._completions.seconds(ends, now))

    def _enter(self, account: _Account, demand: Demand, now: float) -> Ticket:
        if self.requests == 0:
            self._completions.resume(now)
        account.take(demand, now)
        self.requests += 1
        self.sequences += demand.sequences
        self.slots += demand.slots
        self.idle.clear()
        return Ticket(lambda used: self._leave(account, demand, used))

    def _leave(self, account: _Account, demand: Demand, used: int | None) -> None:
        now = self._clock()
        account.settle(demand, demand.tokens if used is None else used, now)
        self._completions.observe(demand.sequences, now)
        self.requests -= 1
        self.sequences -= demand.sequences
        self.slots -= demand.slots
        if self.requests == 0:
            self.idle.set()


class _Account:
    """What one client has taken."""

    def __init__(self, client: Client, now: float) -> None:
        self.client = client
        self.running = 0  # requests
        self._requests = Bucket(client.requests_per_minute, now)
        self._tokens = Bucket(client.tokens_per_minute, now)

    def check_rates(self, demand: Demand, now: float) -> None:
        """AdmissionError for what the rates do not allow now, ParameterError for what they never will."""
        limit = self.client.tokens_per_minute
        if limit is not None and demand.tokens > limit:
            allowed = (
                f"fewer: prompts and outputs of {demand.tokens} tokens exceed this key's tokens_per_minute, {limit}"
            )
            raise ParameterError("max_tokens", demand.max_tokens, allowed)
        rates = (("requests_per_minute", self._requests, 1), ("tokens_per_minute", self._tokens, demand.tokens))
        name, bucket, amount = max(rates, key=lambda rate: rate[1].seconds(rate[2], now))
        seconds = bucket.seconds(amount, now)
        if seconds > 0:
            message = f"{name}: this key is allowed {bucket.per_minute}, and {amount} more would exceed that"
            raise _too_many("rate_limit_exceeded", message, seconds)

    def take(self, demand: Demand, now: float) -> None:
        self.running += 1
        self._requests.take(1, now)
        self._tokens.take(demand.tokens, now)

    def settle(self, demand: Demand, used: int, now: float) -> None:
        self.running -= 1
        self._tokens.put_back(max(demand.tokens - used, 0), now)


def _too_many(code: str, message: str, seconds: float) -> AdmissionError:
    return AdmissionError(HTTPStatus.TOO_MANY_REQUESTS, code, message, seconds)
