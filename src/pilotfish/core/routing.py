"""Which replica gets a request: one that has KV of its first tokens, unless others have much less to do.

    score = share of the prompt whose KV it has  -  BETA * (its load - mean load) / mean load

Loads and prompts are in tokens, so the score has no unit, and no threshold at which affinity ends: a hot prefix
spreads as its replica's load grows. What this server has promised to a replica counts from the moment of the choice, so
requests between two reports do not all go where the last report said that there was room.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import numpy as np

from pilotfish.core.held_prefixes import HeldCopies, Replica, RoutingKey
from pilotfish.core.prefix_keys import OBJECT_TOKENS

#: How much a load above the mean weighs against KV that is there.
BETA = 1.0


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What routing looks at of a request."""

    tokens: int  # of its prompt
    keys: Sequence[RoutingKey] = ()  # `routing_keys` of the prompt
    session: str | None = None  # requests of one belong together, as their client says


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What a target says of its requests, those of all servers together."""

    pending_tokens: int  # committed tokens without KV, of running and waiting requests
    live_tokens: int  # slots that requests own


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Where a request goes. The one who asked for it says when the request has ended, or that it was never sent."""

    replica: Replica
    cached: int  # tokens of its prompt whose KV the replica is believed to have
    promised: int  # tokens that the replica has to keep, or to compute, for it


class Routing(Protocol):
    def choose(self, request: RouteRequest, candidates: Sequence[Replica]) -> Route:
        """One of the candidates, of which there is one at least."""

    def undo(self, route: Route) -> None:
        """The request was not sent there."""

    def ended(self, route: Route) -> None:
        """The request has ended there, however it did."""

    def told(self, replica: Replica, load: ReplicaLoad) -> None:
        """A replica has reported its load."""

    def forget(self, replica: Replica) -> None:
        """A replica is gone."""


@dataclass
class RoundRobin:
    """One after the other; a baseline."""

    _turns: count[int] = field(default_factory=count)

    def choose(self, request: RouteRequest, candidates: Sequence[Replica]) -> Route:
        return Route(candidates[next(self._turns) % len(candidates)], 0, request.tokens)

    def undo(self, route: Route) -> None: ...

    def ended(self, route: Route) -> None: ...

    def told(self, replica: Replica, load: ReplicaLoad) -> None: ...

    def forget(self, replica: Replica) -> None: ...


class PowerOfTwo:
    """Of two replicas drawn at random the one with fewer requests of this server; a baseline."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._requests: Counter[Replica] = Counter()

    def choose(self, request: RouteRequest, candidates: Sequence[Replica]) -> Route:
        first, step = self._random.integers([0, 1], [len(candidates), max(len(candidates), 2)]).tolist()
        drawn = candidates[first], candidates[(first + step) % len(candidates)]
        replica = min(drawn, key=self._requests.__getitem__)
        self._requests[replica] += 1
        return Route(replica, 0, request.tokens)

    def undo(self, route: Route) -> None:
        self.ended(route)

    def ended(self, route: Route) -> None:
        if self._requests[route.replica] > 0:
            self._requests[route.replica] -= 1

    def told(self, replica: Replica, load: ReplicaLoad) -> None: ...

    def forget(self, replica: Replica) -> None:
        del self._requests[replica]


@dataclass(slots=True)
class KnownLoad:
    """A replica's load: as it was reported last, and what this server has promised it since."""

    reported: int | None = None  # tokens; None before the first report
    before: list[Route] = field(default_factory=list)  # since the report before the last, which may have missed them
    since: list[Route] = field(default_factory=list)  # since the last report

    @property
    def promised(self) -> int:
        return sum(route.promised for route in self.before) + sum(route.promised for route in self.since)

    def report(self, tokens: int) -> None:
        self.reported, self.before, self.since = tokens, self.since, []

    def undo(self, route: Route) -> None:
        for routes in (self.before, self.since):
            if route in routes:
                routes.remove(route)


class Router:
    """See the module. What replicas hold it learns through `held`."""

    def __init__(self, beta: float = BETA) -> None:
        self.held = HeldCopies()
        self._beta = beta
        self._loads: defaultdict[Replica, KnownLoad] = defaultdict(KnownLoad)

    def choose(self, request: RouteRequest, candidates: Sequence[Replica]) -> Route:
        cached = self._cached(request)
        loads = self._loads_of(candidates)
        mean = sum(loads) / len(loads)

        def score(place: int) -> tuple[float, bytes]:
            found = cached.get(candidates[place], 0) / max(request.tokens, 1)
            return found - self._beta * (loads[place] - mean) / max(mean, 1.0), affinity(request, candidates[place])

        replica = candidates[max(range(len(candidates)), key=score)]
        route = Route(replica, cached.get(replica, 0), request.tokens)
        self._loads[replica].since.append(route)
        return route

    def _cached(self, request: RouteRequest) -> dict[Replica, int]:
        """Tokens of its prompt whose KV replicas have; the last one is always computed."""
        matched = self.held.matched(request.keys)
        return {replica: min(OBJECT_TOKENS * pages, request.tokens - 1) for replica, pages in matched.items()}

    def _loads_of(self, candidates: Sequence[Replica]) -> list[float]:
        """In tokens. One that has reported nothing yet has the mean of the others, and what it was promised."""
        known = [self._loads[replica] for replica in candidates]
        reported = [load.reported for load in known if load.reported is not None]
        mean = sum(reported) / max(len(reported), 1)
        return [(mean if load.reported is None else load.reported) + load.promised for load in known]

    def undo(self, route: Route) -> None:
        self._loads[route.replica].undo(route)

    def ended(self, route: Route) -> None: ...

    def told(self, replica: Replica, load: ReplicaLoad) -> None:
        self._loads[replica].report(load.pending_tokens + load.live_tokens)

    def forget(self, replica: Replica) -> None:
        self._loads.pop(replica, None)
        self.held.forget(replica)


def affinity(request: RouteRequest, replica: Replica) -> bytes:
    """The replica that has the highest of all is the request's own, where nothing else tells them apart: the same one
    for all requests of a session, or of prompts that begin alike, and another for few of them when replicas come and
    go (rendezvous hashing)."""
    whose = request.session.encode() if request.session else b"".join(request.keys[:1])
    return hashlib.blake2b(replica.encode() + b"\0" + whose, digest_size=8).digest()
