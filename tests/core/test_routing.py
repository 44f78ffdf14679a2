"""Where requests go: to KV that is there, unless others have less to do; to nobody in a herd; always to a candidate."""

from pilotfish.core.held_prefixes import Held, routing_keys
from pilotfish.core.prefix_keys import OBJECT_TOKENS
from pilotfish.core.routing import PowerOfTwo, ReplicaLoad, RoundRobin, Router, RouteRequest, Routing

REPLICAS = ["ipc://a", "ipc://b", "ipc://c", "ipc://d"]


def request(pages: int, first: int = 0, salt: str | None = None, session: str | None = None) -> RouteRequest:
    tokens = [first, *range(1, OBJECT_TOKENS * pages + 10)]
    return RouteRequest(len(tokens), routing_keys(salt, tokens), session)


def even(router: Routing, tokens: int) -> None:
    for replica in REPLICAS:
        router.told(replica, ReplicaLoad(0, tokens))


def test_a_request_goes_where_its_prefix_is() -> None:
    router = Router()
    even(router, 1000)
    router.held.apply("ipc://c", Held(0, request(4).keys[:3], whole=True))  # type: ignore[arg-type]
    route = router.choose(request(4), REPLICAS)
    assert (route.replica, route.cached) == ("ipc://c", 3 * OBJECT_TOKENS)


def test_a_tenant_finds_nothing_of_another() -> None:
    router = Router()
    for replica in REPLICAS:
        router.held.apply(replica, Held(0, list(request(4, salt="one").keys), whole=True))
    assert router.choose(request(4, salt="two"), REPLICAS).cached == 0
    assert router.choose(request(4, salt="one"), REPLICAS).cached == 4 * OBJECT_TOKENS


def test_the_last_token_is_never_cached() -> None:
    router, tokens = Router(), [0] * (2 * OBJECT_TOKENS)
    keys = routing_keys(None, tokens)
    router.held.apply("ipc://a", Held(0, keys, whole=True))
    assert router.choose(RouteRequest(len(tokens), keys), ["ipc://a"]).cached == 2 * OBJECT_TOKENS - 1


def test_a_hot_prefix_spreads_between_two_reports() -> None:
    router = Router()
    even(router, 0)
    router.held.apply("ipc://a", Held(0, list(request(4).keys), whole=True))
    chosen = [router.choose(request(4), REPLICAS).replica for _ in range(40)]
    assert chosen[0] == "ipc://a"
    assert set(chosen) == set(REPLICAS)
    assert chosen.count("ipc://a") < 20


def test_round_robin_takes_turns() -> None:
    routing = RoundRobin()
    assert [routing.choose(request(1), REPLICAS).replica for _ in range(5)] == [*REPLICAS, REPLICAS[0]]


def test_power_of_two_avoids_the_one_with_most_requests() -> None:
    routing = PowerOfTwo()
    routes = [routing.choose(request(1), REPLICAS) for _ in range(400)]
    counts = [sum(route.replica == replica for route in routes) for replica in REPLICAS]
    assert max(counts) - min(counts) <= 8
    for route in routes:
        routing.ended(route)
    busy = routing.choose(request(1), REPLICAS).replica
    assert all(routing.choose(request(1), [busy, other]).replica == other for other in REPLICAS if other != busy)
