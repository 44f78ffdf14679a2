"""The gate: nobody gets more than the limits, every release frees what was taken, and a refusal says when to return."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pilotfish.errors import ParameterError, PilotfishError, UnknownOptionError
from pilotfish.server.admission import Admission, AdmissionError, Capacity, Demand, Limits, Ticket
from pilotfish.server.keys import ANONYMOUS, Client

CAPACITY = Capacity(max_requests=2, kv_slots=100)
SMALL = Demand((1,), 1)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refused(gate: Admission, client: Client, demand: Demand = SMALL) -> AdmissionError:
    """The refusal of a request, which is one line and changes nothing."""
    before = (gate.requests, gate.sequences, gate.slots)
    with pytest.raises(AdmissionError) as caught:
        gate.admit(client, demand, CAPACITY)
    assert "\n" not in str(caught.value) and isinstance(caught.value, PilotfishError)
    assert (gate.requests, gate.sequences, gate.slots) == before
    assert isinstance(caught.value.retry_after, int) and 1 <= caught.value.retry_after <= 60
    return caught.value


def test_what_a_request_asks_for() -> None:
    demand = Demand((3, 5), max_tokens=10, n=4)
    assert (demand.sequences, demand.tokens, demand.slots) == (8, 88, 112)


def test_concurrency_of_a_client_is_its_own(clock: Clock) -> None:
    gate, one, two = Admission(Limits(), clock), Client("a", max_concurrency=2), Client("b", max_concurrency=1)
    tickets = [gate.admit(one, SMALL, CAPACITY) for _ in range(2)]
    error = refused(gate, one)
    assert (error.status, error.code) == (HTTPStatus.TOO_MANY_REQUESTS, "concurrency_exceeded")
    assert str(error) == "max_concurrency: 2 requests of this key have not ended; 2 are allowed"
    tickets.append(gate.admit(two, SMALL, CAPACITY))
    tickets[0].release()
    tickets[0].release()  # counts once
    tickets.append(gate.admit(one, SMALL, CAPACITY))
    refused(gate, one)


def test_requests_per_minute(clock: Clock) -> None:
    gate, client = Admission(Limits(), clock), Client("a", requests_per_minute=3)
    for _ in range(3):
        gate.admit(client, SMALL, CAPACITY).release(0)
    error = refused(gate, client)
    assert (error.status, error.code, error.retry_after) == (429, "rate_limit_exceeded", 20)
    assert str(error) == "requests_per_minute: this key is allowed 3, and 1 more would exceed that"
    clock.now = 19.5
    assert refused(gate, client).retry_after == 1
    clock.now = 20.0
    gate.admit(client, SMALL, CAPACITY).release()
    assert refused(gate, client).retry_after == 20


def test_tokens_per_minute_are_settled_to_what_was_used(clock: Clock) -> None:
    gate, client = Admission(Limits(), clock), Client("a", tokens_per_minute=60)
    ticket = gate.admit(client, Demand((10,), 50), CAPACITY)
    error = refused(gate, client, Demand((10,), 20))
    assert (error.code, error.retry_after) == ("rate_limit_exceeded", 30)
    assert str(error) == "tokens_per_minute: this key is allowed 60, and 30 more would exceed that"
    ticket.release(25)
    ticket.release(0)
    assert refused(gate, client, Demand((10,), 26)).retry_after == 1
    gate.admit(client, Demand((10,), 25), CAPACITY).release()
    assert refused(gate, client).retry_after == 2


def test_more_used_than_asked_is_no_debt(clock: Clock) -> None:
    gate, client = Admission(Limits(), clock), Client("a", tokens_per_minute=60)
    gate.admit(client, Demand((10,), 10), CAPACITY).release(10**9)
    gate.admit(client, Demand((10,), 30), CAPACITY).release()


def test_a_refused_request_takes_nothing_of_any_rate(clock: Clock) -> None:
    gate, client = Admission(Limits(), clock), Client("a", requests_per_minute=2, tokens_per_minute=60)
    gate.admit(client, Demand((10,), 50), CAPACITY).release()
    for _ in range(10):
        assert "tokens_per_minute" in str(refused(gate, client))
    clock.now = 2.0
    gate.admit(client, SMALL, CAPACITY).release()


def test_what_a_rate_never_allows_is_a_bad_parameter(clock: Clock) -> None:
    gate, client = Admission(Limits(), clock), Client("a", tokens_per_minute=60)
    message = (
        "max_tokens: 30 is not allowed; expected fewer: prompts and outputs of 70 tokens exceed this key's "
        "tokens_per_minute, 60"
    )
    with pytest.raises(ParameterError) as caught:
        gate.admit(client, Demand((10,), 30, n=2), CAPACITY)
    assert str(caught.value) == message and caught.value.field == "max_tokens" and gate.requests == 0


def test_a_full_queue_of_sequences(clock: Clock) -> None:
    gate = Admission(Limits(max_queued_requests=3), clock)
    tickets = [gate.admit(ANONYMOUS, Demand((1, 1), 1), CAPACITY) for _ in range(2)]
    error = refused(gate, ANONYMOUS, Demand((1,), 1, n=2))
    assert (error.status, error.code) == (HTTPStatus.TOO_MANY_REQUESTS, "queue_full")
    assert str(error) == "max_queued_requests: 2 sequences wait and 2 more would; 3 may"
    tickets.append(gate.admit(ANONYMOUS, SMALL, CAPACITY))
    refused(gate, ANONYMOUS)
    tickets[0].release()
    tickets.append(gate.admit(ANONYMOUS, Demand((1,), 1, n=2), CAPACITY))


@pytest.mark.parametrize(("limits", "allowed"), [(Limits(max_queued_tokens=50), 50), (Limits(), 400)])
def test_a_full_queue_of_tokens(limits: Limits, allowed: int, clock: Clock) -> None:
    gate = Admission(limits, clock)
    tickets = [gate.admit(ANONYMOUS, Demand((10,), 40), CAPACITY) for _ in range((CAPACITY.kv_slots + allowed) // 50)]
    error = refused(gate, ANONYMOUS, Demand((1,), 0))
    assert error.code == "queue_full"
    assert str(error) == f"max_queued_tokens: {allowed} tokens wait and 1 more would; {allowed} may"
    tickets[0].release()
    tickets.append(gate.admit(ANONYMOUS, SMALL, CAPACITY))


def test_nobody_is_turned_away_forever(clock: Clock) -> None:
    """A request above both limits of the queue waits for the others to end, then it is let in."""
    gate, large = Admission(Limits(max_queued_requests=0, max_queued_tokens=1), clock), Demand((50,), 50, n=16)
    ticket = gate.admit(ANONYMOUS, SMALL, CAPACITY)
    assert refused(gate, ANONYMOUS, large).code == "queue_full"
    ticket.release()
    gate.admit(ANONYMOUS, large, CAPACITY).release()


def test_retry_after_follows_the_rate_of_completions(clock: Clock) -> None:
    gate = Admission(Limits(max_queued_requests=0), clock)
    running = [gate.admit(ANONYMOUS, SMALL, CAPACITY) for _ in range(2)]
    assert refused(gate, ANONYMOUS).retry_after == 60  # nothing has ended yet
    for _ in range(100):
        clock.now += 5.0
        running.pop(0).release()
        running.append(gate.admit(ANONYMOUS, SMALL, CAPACITY))
    assert refused(gate, ANONYMOUS).retry_after in (4, 5, 6)
    assert refused(gate, ANONYMOUS, Demand((1,), 1, n=2)).retry_after in (8, 9, 10, 11, 12)
    for _ in range(1000):
        clock.now += 0.1
        running.pop(0).release()
        running.append(gate.admit(ANONYMOUS, SMALL, CAPACITY))
    assert refused(gate, ANONYMOUS).retry_after == 1


def test_idle_time_says_nothing_about_the_rate_of_completions(clock: Clock) -> None:
    gate = Admission(Limits(max_queued_requests=0), clock)
    for _ in range(100):
        with gate.admit(ANONYMOUS, SMALL, CAPACITY):
            clock.now += 5.0
        clock.now += 1000.0
    running = [gate.admit(ANONYMOUS, SMALL, CAPACITY) for _ in range(2)]
    assert refused(gate, ANONYMOUS).retry_after in (4, 5, 6) and len(running) == 2


def test_a_ticket_ends_with_its_block_whatever_happens(clock: Clock) -> None:
    gate = Admission(Limits(), clock)
    with pytest.raises(KeyError), gate.admit(ANONYMOUS, SMALL, CAPACITY):
        assert gate.requests == 1
        raise KeyError
    assert (gate.requests, gate.sequences, gate.slots) == (0, 0, 0)


def test_a_block_without_release_has_used_all_and_one_with_it_what_it_said(clock: Clock) -> None:
    gate, client = Admission(Limits(), clock), Client("a", tokens_per_minute=60)
    with gate.admit(client, Demand((10,), 50), CAPACITY) as ticket:
        ticket.release(20)
    with gate.admit(client, Demand((10,), 30), CAPACITY):
        pass
    assert refused(gate, client).retry_after == 2


def test_a_ticket_that_is_dropped_is_released(clock: Clock) -> None:
    gate = Admission(Limits(), clock)

    async def response(ticket: Ticket) -> None:
        with ticket:
            await asyncio.sleep(0)

    never_awaited = response(gate.admit(ANONYMOUS, SMALL, CAPACITY))
    assert gate.requests == 1
    never_awaited.close()
    del never_awaited
    assert gate.requests == 0 and gate.idle.is_set()


def test_draining_lets_nobody_in_and_waits_for_those_inside(clock: Clock) -> None:
    async def drain() -> None:
        gate = Admission(Limits(), clock)
        assert gate.idle.is_set()
        tickets = [gate.admit(ANONYMOUS, SMALL, CAPACITY) for _ in range(2)]
        gate.close()
        error = refused(gate, ANONYMOUS)
        assert (error.status, error.code) == (HTTPStatus.SERVICE_UNAVAILABLE, "draining")
        assert str(error).startswith("draining: ")
        waiting = asyncio.create_task(gate.idle.wait())
        for ticket in tickets:
            await asyncio.sleep(0)
            assert not waiting.done()
            ticket.release()
        await waiting
        assert refused(gate, ANONYMOUS).retry_after == 1

    asyncio.run(drain())


@pytest.mark.parametrize("field", ["max_queued_requests", "max_queued_tokens"])
@pytest.mark.parametrize("value", [-1, 1.5, True, None, "3", 1 << 41])
def test_limits_are_checked(field: str, value: object) -> None:
    with pytest.raises(ParameterError, match=rf"{field}: .* is not allowed; expected an integer 0 to \d+$"):
        Limits(**{field: value})  # type: ignore[arg-type]


def test_an_unknown_limit_is_refused() -> None:
    with pytest.raises(UnknownOptionError, match="max_queue"):
        Limits(max_queue=3)  # type: ignore[call-arg]


CLIENTS = (
    ANONYMOUS,
    Client("a", max_concurrency=2, requests_per_minute=6),
    Client("b", tokens_per_minute=90),
    Client("c", max_concurrency=1, requests_per_minute=30, tokens_per_minute=300),
)
DEMANDS = st.builds(
    Demand, st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple), st.integers(0, 40), st.integers(1, 3)
)


class Interleaved(RuleBasedStateMachine):
    """Clients come and go in any order; the model is a list of who is inside, and of what each client has used when."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.gate = Admission(Limits(max_queued_requests=4, max_queued_tokens=150), self.clock)
        self.inside: list[tuple[Ticket, Client, Demand]] = []
        self.entries: list[tuple[float, Client]] = []
        self.used: list[tuple[float, Client, int]] = []

    @rule(client=st.sampled_from(CLIENTS), demand=DEMANDS)
    def come(self, client: Client, demand: Demand) -> None:
        alone = not self.inside
        try:
            ticket = self.gate.admit(client, demand, CAPACITY)
        except (AdmissionError, ParameterError):
            return
        self.inside.append((ticket, client, demand))
        self.entries.append((self.clock.now, client))
        assert alone or self.gate.sequences <= CAPACITY.max_requests + 4
        assert alone or self.gate.slots <= CAPACITY.kv_slots + 150

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        ticket, client, demand = self.inside.pop(data.draw(st.integers(0, len(self.inside) - 1)))
        used = data.draw(st.none() | st.integers(0, demand.tokens))
        ticket.release(used)
        ticket.release(data.draw(st.none() | st.integers(0, demand.tokens)))
        self.used.append((self.clock.now, client, demand.tokens if used is None else used))

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def counts_are_those_of_who_is_inside(self) -> None:
        assert self.gate.requests == len(self.inside)
        assert self.gate.sequences == sum(demand.sequences for _, _, demand in self.inside)
        assert self.gate.slots == sum(demand.slots for _, _, demand in self.inside)
        assert self.gate.idle.is_set() == (not self.inside)

    @invariant()
    def nobody_has_more_than_its_limits(self) -> None:
        for client in CLIENTS:
            running = sum(other is client for _, other, _ in self.inside)
            assert client.max_concurrency is None or running <= client.max_concurrency
            if client.requests_per_minute:
                times = [now for now, other in self.entries if other is client]
                for first, start in enumerate(times):
                    bound = client.requests_per_minute * (1 + (times[-1] - start) / 60)
                    assert len(times) - first <= bound + 1e-3
            if client.tokens_per_minute:
                tokens = sum(count for _, other, count in self.used if other is client)
                asked = sum(demand.tokens for _, other, demand in self.inside if other is client)
                assert tokens + asked <= client.tokens_per_minute * (1 + self.clock.now / 60) + 1e-3

    def teardown(self) -> None:
        for ticket, *_ in self.inside:
            ticket.release()
        assert (self.gate.requests, self.gate.sequences, self.gate.slots) == (0, 0, 0)
        assert self.gate.idle.is_set()


TestInterleaved = Interleaved.TestCase


@given(st.lists(DEMANDS, min_size=1, max_size=30))
def test_after_retry_after_a_rate_lets_in(demands: list[Demand]) -> None:
    clock = Clock()
    gate, client = Admission(Limits(), clock), Client("a", requests_per_minute=7, tokens_per_minute=500)
    for demand in demands:
        try:
            gate.admit(client, demand, CAPACITY).release()
        except AdmissionError as error:
            clock.now += error.retry_after
            gate.admit(client, demand, CAPACITY).release()
        except ParameterError:
            assert demand.tokens > 500
