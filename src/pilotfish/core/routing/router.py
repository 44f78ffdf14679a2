"""Which replica gets a request: the one expected to have the least to do before its first token.

    tokens   [ pending of others │ what it lacks of the prompt │ 2 % of live ones │ 1,000 a request without room ]

A request goes where its prefix is, unless others have so much less to do that they compute it sooner: so a hot prefix
spreads without a threshold. Among similar replicas requests of one session, or with prompts that begin alike, go to the
same one. Requests sent since the last report count at once.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS
from pilotfish.core.routing.held_prefixes import HeldCopies, Replica, RoutingKey

LIVE = 0.02  # cost of a token that requests own to others, over computing one
ROOM = 1000  # tokens that could be computed while a request waits until another has ended
#: Share of a prompt: a difference in work too small to move a session for, so that servers do not all pick one replica.
LITTLE = 0.1


@dataclass(frozen=True, slots=True)
class RouteRequest:
    tokens: int  # of its prompt
    keys: Sequence[RoutingKey] = ()  # `routing_keys` of the prompt
    session: str | None = None  # requests of one belong together, as their client says


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Of a target's requests from all servers."""

    pending_tokens: int  # committed tokens without KV, of running and waiting requests
    live_tokens: int  # slots that requests own
    waiting: int  # requests that wait for others to end
    room: int  # requests that may run beside those that do


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """The asker tells when the request has ended, or was never sent."""

    replica: Replica
    cached: int  # tokens of its prompt whose KV the replica is believed to have
    work: float  # that the replica has with it, in tokens


@dataclass(slots=True)
class KnownLoad:
    reported: ReplicaLoad | None = None
    before: list[Route] = field(default_factory=list)  # since the report before the last, which may have missed them
    since: list[Route] = field(default_factory=list)  # since the last report
    promised: float = 0.0  # the work of both
    work: float | None = None  # in tokens, of one more request but for its prompt; None before the first report

    def promise(self, route: Route) -> None:
        self.since.append(route)
        self._changed(self.promised + route.work)

    def take_back(self, route: Route) -> None:
        for routes in (self.before, self.since):
            if route in routes:
                routes.remove(route)
                self._changed(self.promised - route.work)

    def report(self, load: ReplicaLoad) -> None:
        self.reported, self.before, self.since = load, self.since, []
        self._changed(sum(route.work for route in self.before))

    def _changed(self, promised: float) -> None:
        self.promised = promised
        if (load := self.reported) is not None:
            without_room = max(load.waiting + len(self.before) + len(self.since) + 1 - load.room, load.waiting)
            self.work = load.pending_tokens + LIVE * load.live_tokens + promised + ROOM * without_room


class Router:
    def __init__(self) -> None:
        self.held = HeldCopies()  # kept by who asks for routes
        self._loads: defaultdict[Replica, KnownLoad] = defaultdict(KnownLoad)

    def choose(self, request: RouteRequest, candidates: Sequence[Replica]) -> Route:
        """Of at least one candidate."""
        most, matched = request.tokens - 1, self.held.matched(request.keys)  # the last token is always computed
        cached = {replica: min(OBJECT_TOKENS * pages, most) for replica, pages in matched.items()}
        works = self._works(candidates)
        left = [work - cached.get(replica, 0) for replica, work in zip(candidates, works, strict=True)]
        enough = min(left) + LITTLE * request.tokens
        alike = [replica for replica, work in zip(candidates, left, strict=True) if work <= enough]
        replica = alike[0] if len(alike) == 1 else max(alike, key=lambda replica: affinity(request, replica))
        found = cached.get(replica, 0)
        route = Route(replica, found, request.tokens - found + LIVE * request.tokens)
        self._loads[replica].promise(route)
        return route

    def _works(self, candidates: Sequence[Replica]) -> list[float]:
        """A replica without reports counts as the mean of the others."""
        loads = [self._loads[replica] for replica in candidates]
        known = [load.work for load in loads if load.work is not None]
        if len(known) == len(loads):
            return known
        mean = sum(load.work - load.promised for load in loads if load.work is not None) / max(len(known), 1)
        return [mean + load.promised if load.work is None else load.work for load in loads]

    def ended(self, route: Route) -> None:
        """The request has ended there, however it did, or was not sent."""
        self._loads[route.replica].take_back(route)

    def told(self, replica: Replica, load: ReplicaLoad) -> None:
        self._loads[replica].report(load)

    def forget(self, replica: Replica) -> None:
        self._loads.pop(replica, None)
        self.held.forget(replica)


def affinity(request: RouteRequest, replica: Replica) -> bytes:
    """The highest value marks a request's own replica: one for each session, or for prompts that begin alike; few
    move when replicas come and go (rendezvous hashing)."""
    whose = request.session.encode() if request.session else b"".join(request.keys[:1])
    return hashlib.blake2b(replica.encode() + b"\0" + whose, digest_size=8).digest()
