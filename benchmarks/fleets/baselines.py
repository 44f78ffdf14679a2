"""Routing that looks at no prefixes and no loads, to compare a `Router` with."""

from collections import Counter
from collections.abc import Sequence
from itertools import count

import numpy as np

from pilotfish.core.routing.held_prefixes import Replica
from pilotfish.core.routing.router import Route, Router, RouteRequest


class RoundRobin(Router):
    def __init__(self) -> None:
        super().__init__()
        self._turns = count()

    def choose(self, request: RouteRequest, candidates: Sequence[Replica]) -> Route:  # noqa: ARG002
        return Route(candidates[next(self._turns) % len(candidates)], 0, 0.0)


class PowerOfTwo(Router):
    """Of two replicas drawn at random the one with fewer requests of this server."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._random = np.random.default_rng(seed)
        self._requests: Counter[Replica] = Counter()

    def choose(self, request: RouteRequest, candidates: Sequence[Replica]) -> Route:  # noqa: ARG002
        first, step = self._random.integers([0, 1], [len(candidates), max(len(candidates), 2)]).tolist()
        drawn = candidates[first], candidates[(first + step) % len(candidates)]
        replica = min(drawn, key=self._requests.__getitem__)
        self._requests[replica] += 1
        return Route(replica, 0, 0.0)

    def ended(self, route: Route) -> None:
        self._requests[route.replica] -= 1
