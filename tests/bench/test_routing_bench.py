"""The bench of policies of routing: what clients say, what the figures are, and one run of all."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from conftest import Invoke
from sizes import in_soak

from pilotfish.bench.offered_loads import TokenRing
from pilotfish.bench.routing import (
    POLICIES,
    POWER_OF_TWO,
    PREFIX,
    WORKLOADS,
    BegunAnswer,
    Played,
    even_holds,
    routing_rows,
)
from pilotfish.bench.talks import AGENTS, CONVERSATIONS, EVEN, HOT, MESSAGE, STEPS, SYSTEMS, talks

TEXT = TokenRing(range(100_000), seed=0)


def test_what_talks_begin_with() -> None:
    begins = {kind: [tuple(one.begin) for one in islice(talks(kind, TEXT, 64, 1), 200)] for kind in WORKLOADS}
    assert len(set(begins[CONVERSATIONS])) == 200 and set(begins[EVEN]) == {()} and len(set(begins[HOT])) == 1
    often = [count for _, count in Counter(begins[AGENTS]).most_common()]
    assert len(often) == SYSTEMS and often[0] > 3 * often[-1]
    (task,) = islice(talks(AGENTS, TEXT, 64, 1), 1)
    assert (len(task.begin), list(map(len, task.messages))) == (64, [MESSAGE] * STEPS)


def test_all_policies_are_asked_the_same() -> None:
    first, again = (list(islice(talks(AGENTS, TokenRing(range(999), 5), 64, 5), 20)) for _ in range(2))
    assert first == again


def played(first_token: float, tokens: int, found: int = 0, **chosen: int) -> Played:
    begun = [BegunAnswer(100, found, first_token), BegunAnswer(300, found, 3 * first_token)]
    return Played(False, begun, tokens, 2.0, 2 * found, Counter(chosen), 10, 1)


def rounds_of(own_speed: int = 990) -> dict[str, list[dict[str, Played]]]:
    one = {kind: played(0.1, own_speed, 80, a=1, b=3) for kind in WORKLOADS}
    other = {kind: played(0.2, 1000, 20, a=2, b=2) for kind in WORKLOADS}
    return {name: [one if name == PREFIX else other] * 2 for name in POLICIES}


def test_figures_are_of_all_rounds_and_over_power_of_two() -> None:
    rows = {(row["workload"], row["policy"]): row for row in routing_rows(rounds_of())}
    own, base = rows[HOT, PREFIX], rows[HOT, POWER_OF_TWO]
    assert (own["requests"], own["prompt_tokens"], own["found"], own["expected"]) == (4, 200, 0.4, 0.4)
    assert (own["first_token_p50_ms"], own["first_token_p95_ms"]) == pytest.approx((300, 300))
    assert (own["tokens_per_second"], own["busiest"], own["overruns"]) == (495, 1.5, 0.1)
    assert (own["p50_over"], base["p50_over"], own["tokens_per_second_over"]) == pytest.approx((0.5, 1.0, 0.99))


@pytest.mark.parametrize(("speed", "holds"), [(1010, True), (981, True), (979, False)])
def test_even_load_may_cost_two_percent(speed: int, holds: bool) -> None:
    assert even_holds(list(routing_rows(rounds_of(speed)))) is holds


@in_soak
def test_all_of_it(invoke: Invoke) -> None:
    results = invoke("routing", "--replicas=2", "--streams=3", "--shared=128", "--seconds=1", "--repeats=1")
    rows = {(row["workload"], row["policy"]): row for row in results["workloads"]}
    assert rows.keys() == {(kind, policy) for kind in WORKLOADS for policy in POLICIES}
    assert all(row["requests"] > 0 and row["tokens_per_second"] > 0 for row in rows.values())
    assert rows[CONVERSATIONS, PREFIX]["found"] > rows[EVEN, PREFIX]["found"]
