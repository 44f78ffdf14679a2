"""Admission: nobody gets more than the limits, every release frees what was taken, a refusal says when to return."""

import asyncio
from http import HTTPStatus

import msgspec
import pytest
from http_double import IDENTITY
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kv_objects import Clock
from sizes import sized

from pilotfish.config.server import ServerConfig
from pilotfish.errors import ParameterError
from pilotfish.server.auth import ANONYMOUS, Caller
from pilotfish.server.http_errors import HttpError
from pilotfish.server.limits import Admission, Reservation, TokenBucket
from pilotfish.server.observe.request_records import RequestFacts

TARGET = msgspec.structs.replace(IDENTITY, max_requests=2, kv_slots=100)
SMALL = RequestFacts((1,), 1)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def seconds(error: HttpError) -> int:
    return int(error.headers["retry-after"])


def refused(admission: Admission, caller: Caller, cost: RequestFacts = SMALL) -> HttpError:
    """The refusal of a request, which is one line and changes nothing."""
    before = (admission.requests, admission.sequences, admission.slots)
    with pytest.raises(HttpError) as caught:
        admission.admit(caller, cost, TARGET)
    assert "\n" not in str(caught.value)
    assert (admission.requests, admission.sequences, admission.slots) == before
    assert 1 <= seconds(caught.value) <= 60
    return caught.value


def test_concurrency_of_a_client_is_its_own(clock: Clock) -> None:
    admission = Admission(ServerConfig(), clock)
    one, two = Caller("a", max_concurrency=2), Caller("b", max_concurrency=1)
    reservations = [admission.admit(one, SMALL, TARGET) for _ in range(2)]
    error = refused(admission, one)
    assert (error.status, error.code) == (HTTPStatus.TOO_MANY_REQUESTS, "concurrency_exceeded")
    assert str(error) == "max_concurrency: 2 requests of this key have not ended; 2 are allowed"
    reservations.append(admission.admit(two, SMALL, TARGET))
    reservations[0].release()
    reservations[0].release()  # counts once
    reservations.append(admission.admit(one, SMALL, TARGET))
    refused(admission, one)


def test_requests_per_minute(clock: Clock) -> None:
    admission, caller = Admission(ServerConfig(), clock), Caller("a", requests_per_minute=3)
    for _ in range(3):
        admission.admit(caller, SMALL, TARGET).release(0)
    error = refused(admission, caller)
    assert (error.status, error.code, seconds(error)) == (429, "rate_limit_exceeded", 20)
    assert str(error) == "requests_per_minute: this key is allowed 3, and 1 more would exceed that"
    clock.now = 19.5
    assert seconds(refused(admission, caller)) == 1
    clock.now = 20.0
    admission.admit(caller, SMALL, TARGET).release()
    assert seconds(refused(admission, caller)) == 20


def test_tokens_per_minute_are_settled_to_what_was_used(clock: Clock) -> None:
    admission, caller = Admission(ServerConfig(), clock), Caller("a", tokens_per_minute=60)
    reservation = admission.admit(caller, RequestFacts((10,), 50), TARGET)
    error = refused(admission, caller, RequestFacts((10,), 20))
    assert (error.code, seconds(error)) == ("rate_limit_exceeded", 30)
    assert str(error) == "tokens_per_minute: this key is allowed 60, and 30 more would exceed that"
    reservation.release(25)
    reservation.release(0)
    assert seconds(refused(admission, caller, RequestFacts((10,), 26))) == 1
    admission.admit(caller, RequestFacts((10,), 25), TARGET).release()
    assert seconds(refused(admission, caller)) == 2


def test_more_used_than_asked_is_no_debt(clock: Clock) -> None:
    admission, caller = Admission(ServerConfig(), clock), Caller("a", tokens_per_minute=60)
    admission.admit(caller, RequestFacts((10,), 10), TARGET).release(10**9)
    admission.admit(caller, RequestFacts((10,), 30), TARGET).release()


def test_a_refused_request_takes_nothing_of_any_rate(clock: Clock) -> None:
    admission, caller = Admission(ServerConfig(), clock), Caller("a", requests_per_minute=2, tokens_per_minute=60)
    admission.admit(caller, RequestFacts((10,), 50), TARGET).release()
    for _ in range(10):
        assert "tokens_per_minute" in str(refused(admission, caller))
    clock.now = 2.0
    admission.admit(caller, SMALL, TARGET).release()


def test_what_a_rate_never_allows_is_a_bad_parameter(clock: Clock) -> None:
    admission, caller = Admission(ServerConfig(), clock), Caller("a", tokens_per_minute=60)
    message = (
        "max_tokens: 30 is not allowed; expected fewer: prompts and outputs of 70 tokens exceed this key's "
        "tokens_per_minute, 60"
    )
    with pytest.raises(ParameterError) as caught:
        admission.admit(caller, RequestFacts((10,), 30, n=2), TARGET)
    assert str(caught.value) == message and caught.value.field == "max_tokens" and admission.requests == 0


def test_a_full_queue_of_sequences(clock: Clock) -> None:
    admission = Admission(ServerConfig(max_queued_requests=3), clock)
    reservations = [admission.admit(ANONYMOUS, RequestFacts((1, 1), 1), TARGET) for _ in range(2)]
    error = refused(admission, ANONYMOUS, RequestFacts((1,), 1, n=2))
    assert (error.status, error.code) == (HTTPStatus.TOO_MANY_REQUESTS, "queue_full")
    assert str(error) == "max_queued_requests: 2 sequences wait and 2 more would; 3 may"
    reservations.append(admission.admit(ANONYMOUS, SMALL, TARGET))
    refused(admission, ANONYMOUS)
    reservations[0].release()
    reservations.append(admission.admit(ANONYMOUS, RequestFacts((1,), 1, n=2), TARGET))


@pytest.mark.parametrize(("limits", "allowed"), [(ServerConfig(max_queued_tokens=50), 50), (ServerConfig(), 400)])
def test_a_full_queue_of_tokens(limits: ServerConfig, allowed: int, clock: Clock) -> None:
    admission = Admission(limits, clock)
    reservations = [
        admission.admit(ANONYMOUS, RequestFacts((10,), 40), TARGET) for _ in range((TARGET.kv_slots + allowed) // 50)
    ]
    error = refused(admission, ANONYMOUS, RequestFacts((1,), 0))
    assert error.code == "queue_full"
    assert str(error) == f"max_queued_tokens: {allowed} tokens wait and 1 more would; {allowed} may"
    reservations[0].release()
    reservations.append(admission.admit(ANONYMOUS, SMALL, TARGET))


def test_nobody_is_turned_away_forever(clock: Clock) -> None:
    """A request above both limits of the queue waits for the others to end, then it is let in."""
    admission = Admission(ServerConfig(max_queued_requests=0, max_queued_tokens=1), clock)
    large = RequestFacts((50,), 50, n=16)
    reservation = admission.admit(ANONYMOUS, SMALL, TARGET)
    assert refused(admission, ANONYMOUS, large).code == "queue_full"
    reservation.release()
    admission.admit(ANONYMOUS, large, TARGET).release()


def test_retry_after_follows_the_rate_of_completions(clock: Clock) -> None:
    admission = Admission(ServerConfig(max_queued_requests=0), clock)
    running = [admission.admit(ANONYMOUS, SMALL, TARGET) for _ in range(2)]
    assert seconds(refused(admission, ANONYMOUS)) == 60  # nothing has ended yet
    for _ in range(100):
        clock.now += 5.0
        running.pop(0).release()
        running.append(admission.admit(ANONYMOUS, SMALL, TARGET))
        assert seconds(refused(admission, ANONYMOUS)) in (4, 5, 6)
    assert seconds(refused(admission, ANONYMOUS, RequestFacts((1,), 1, n=2))) in (8, 9, 10, 11, 12)
    for _ in range(1000):
        clock.now += 0.1
        running.pop(0).release()
        running.append(admission.admit(ANONYMOUS, SMALL, TARGET))
    assert seconds(refused(admission, ANONYMOUS)) == 1


def test_idle_time_says_nothing_about_the_rate_of_completions(clock: Clock) -> None:
    admission = Admission(ServerConfig(max_queued_requests=0), clock)
    for _ in range(100):
        reservation = admission.admit(ANONYMOUS, SMALL, TARGET)
        clock.now += 5.0
        reservation.release()
        clock.now += 1000.0
    running = [admission.admit(ANONYMOUS, SMALL, TARGET) for _ in range(2)]
    assert seconds(refused(admission, ANONYMOUS)) in (4, 5, 6) and len(running) == 2


def test_what_is_not_released_has_used_all_and_what_is_what_it_said(clock: Clock) -> None:
    admission, caller = Admission(ServerConfig(), clock), Caller("a", tokens_per_minute=60)
    admission.admit(caller, RequestFacts((10,), 50), TARGET).release(20)
    admission.admit(caller, RequestFacts((10,), 30), TARGET)
    assert (admission.requests, admission.sequences, admission.slots) == (0, 0, 0)
    assert seconds(refused(admission, caller)) == 2


def test_a_reservation_that_is_dropped_is_released(clock: Clock) -> None:
    admission = Admission(ServerConfig(), clock)

    async def response(reservation: Reservation) -> None:
        await asyncio.sleep(0)
        reservation.release()

    never_awaited = response(admission.admit(ANONYMOUS, SMALL, TARGET))
    assert admission.requests == 1
    never_awaited.close()
    del never_awaited
    assert admission.requests == 0 and admission.idle.is_set()


def test_draining_lets_nobody_in_and_waits_for_those_inside(clock: Clock) -> None:
    async def drain() -> None:
        admission = Admission(ServerConfig(), clock)
        assert admission.idle.is_set()
        reservations = [admission.admit(ANONYMOUS, SMALL, TARGET) for _ in range(2)]
        admission.closed = True
        error = refused(admission, ANONYMOUS)
        assert (error.status, error.code) == (HTTPStatus.SERVICE_UNAVAILABLE, "draining")
        assert str(error).startswith("draining: ")
        waiting = asyncio.create_task(admission.idle.wait())
        for reservation in reservations:
            await asyncio.sleep(0)
            assert not waiting.done()
            reservation.release()
        await waiting
        assert seconds(refused(admission, ANONYMOUS)) == 1

    asyncio.run(drain())


CALLERS = (
    ANONYMOUS,
    Caller("a", max_concurrency=2, requests_per_minute=6),
    Caller("b", tokens_per_minute=90),
    Caller("c", max_concurrency=1, requests_per_minute=30, tokens_per_minute=300),
)
COSTS = st.builds(
    RequestFacts, st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple), st.integers(0, 40), st.integers(1, 3)
)


class Interleaved(RuleBasedStateMachine):
    """Clients come and go in any order; the model is a list of who is inside, and of what each caller has used when."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.admission = Admission(ServerConfig(max_queued_requests=4, max_queued_tokens=150), self.clock)
        self.inside: list[tuple[Reservation, Caller, RequestFacts]] = []
        self.entries: list[tuple[float, Caller]] = []
        self.used: list[tuple[float, Caller, int]] = []

    @rule(caller=st.sampled_from(CALLERS), cost=COSTS)
    def come(self, caller: Caller, cost: RequestFacts) -> None:
        alone = not self.inside
        try:
            reservation = self.admission.admit(caller, cost, TARGET)
        except (HttpError, ParameterError):
            return
        self.inside.append((reservation, caller, cost))
        self.entries.append((self.clock.now, caller))
        assert alone or self.admission.sequences <= TARGET.max_requests + 4
        assert alone or self.admission.slots <= TARGET.kv_slots + 150

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        reservation, caller, cost = self.inside.pop(data.draw(st.integers(0, len(self.inside) - 1)))
        used = data.draw(st.none() | st.integers(0, cost.tokens))
        reservation.release(used)
        reservation.release(data.draw(st.none() | st.integers(0, cost.tokens)))
        self.used.append((self.clock.now, caller, cost.tokens if used is None else used))

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def counts_are_those_of_who_is_inside(self) -> None:
        assert self.admission.requests == len(self.inside)
        assert self.admission.sequences == sum(cost.sequences for _, _, cost in self.inside)
        assert self.admission.slots == sum(cost.slots for _, _, cost in self.inside)
        assert self.admission.idle.is_set() == (not self.inside)

    @invariant()
    def nobody_has_more_than_its_limits(self) -> None:
        for caller in CALLERS:
            running = sum(other is caller for _, other, _ in self.inside)
            assert caller.max_concurrency is None or running <= caller.max_concurrency
            if caller.requests_per_minute:
                times = [now for now, other in self.entries if other is caller]
                for first, start in enumerate(times):
                    bound = caller.requests_per_minute * (1 + (times[-1] - start) / 60)
                    assert len(times) - first <= bound + 1e-3
            if caller.tokens_per_minute:
                tokens = sum(count for _, other, count in self.used if other is caller)
                asked = sum(cost.tokens for _, other, cost in self.inside if other is caller)
                assert tokens + asked <= caller.tokens_per_minute * (1 + self.clock.now / 60) + 1e-3

    def teardown(self) -> None:
        for reservation, *_ in self.inside:
            reservation.release()
        assert (self.admission.requests, self.admission.sequences, self.admission.slots) == (0, 0, 0)
        assert self.admission.idle.is_set()


TestInterleaved = Interleaved.TestCase
TestInterleaved.settings = settings(max_examples=sized(15, 50), stateful_step_count=sized(25, 50))


AMOUNTS = st.lists(st.tuples(st.floats(0, 90), st.integers(0, 70), st.floats(0, 1)), max_size=60)


@given(st.integers(1, 60), AMOUNTS)
def test_no_window_takes_more_than_a_minutes_worth_and_what_flowed_in(per_minute: int, calls: list) -> None:
    """Also where a part of what was taken is put back: what stays taken is bounded."""
    bucket, now, taken = TokenBucket(per_minute, 0.0), 0.0, [(0.0, 0)]
    for pause, amount, returned in calls:
        now += pause
        if amount <= per_minute and bucket.seconds(amount, now) == 0:
            bucket.take(amount, now)
            bucket.take(-int(amount * returned), now)
            taken.append((now, amount - int(amount * returned)))
    for first, (start, _) in enumerate(taken):
        for last in range(first, len(taken)):
            total = sum(amount for _, amount in taken[first : last + 1])
            assert total <= per_minute * (1 + (taken[last][0] - start) / 60) + 1e-3


@given(st.lists(COSTS, min_size=1, max_size=30))
def test_after_retry_after_a_rate_lets_in(costs: list[RequestFacts]) -> None:
    clock = Clock()
    admission, caller = Admission(ServerConfig(), clock), Caller("a", requests_per_minute=7, tokens_per_minute=500)
    for cost in costs:
        try:
            admission.admit(caller, cost, TARGET).release()
        except HttpError as error:
            clock.now += seconds(error)
            admission.admit(caller, cost, TARGET).release()
        except ParameterError:
            assert cost.tokens > 500
