"""A server of a simulated fleet: what requests and events cost it, and what it knows of replicas. It routes by
`core/routing/router.py` itself."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fleets.run_cache import KnownRun
from fleets.simulated_pools import Average
from fleets.traffic import RunId, SimulatedRequest
from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS
from pilotfish.core.routing.held_prefixes import HeldCopies, Replica, RoutingKey
from pilotfish.core.routing.router import ReplicaLoad, Route, Router, RouteRequest

#: A server cannot be busier than this: what waits for it beyond is not simulated.
BUSIEST = 0.95


@dataclass(frozen=True)
class ServerPlan:
    """Seconds of a server's one core."""

    request_seconds: float  # for a request: its body, and all else but its prompt's tokens
    token_seconds: float  # for each token of its prompt
    event_seconds: float  # for each event of a stream
    frame_seconds: float  # for a target's step that has any of them
    hear_seconds: float  # for any other message of a target
    most: int  # requests that it takes at a time; it refuses others


class SimulatedHeld(HeldCopies):
    """Prefixes that replicas hold, by the names of runs instead of keys; all servers know the same."""

    def __init__(self) -> None:
        super().__init__()
        self.told = 0  # keys that were added or removed
        self._ends: dict[RunId, dict[Replica, int]] = {}  # tokens of the prefix that ends with so much of a run

    def change(self, replica: Replica, run: KnownRun, before: int) -> None:
        """Replica now has the prefix up to `run.end`; it had it up to `before`."""
        self.told += abs(run.end // OBJECT_TOKENS - before // OBJECT_TOKENS)
        if run.tokens:
            self._ends.setdefault(run.id, {})[replica] = run.end
        else:
            ends = self._ends[run.id]
            del ends[replica]
            if not ends:
                del self._ends[run.id]

    def matched(self, keys: Sequence[RoutingKey]) -> dict[Replica, int]:
        found: dict[Replica, int] = {}
        for key in keys:
            found |= self._ends.get(key, {})
        return {replica: end // OBJECT_TOKENS for replica, end in found.items()}


class LoadBoard:
    """The last report of each replica, and their number; servers read it when they choose."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = replicas
        self.loads = [ReplicaLoad(0, 0, 0, 1) for _ in replicas]
        self.numbers = np.ones(len(replicas), np.int64)

    def report(self, place: int, load: ReplicaLoad) -> None:
        self.loads[place] = load
        self.numbers[place] += 1


class SimulatedServer:
    def __init__(self, plan: ServerPlan, routing: Router, board: LoadBoard, sending: Average, first: int) -> None:
        """`sending` are the seconds that each server spends on events; `first` is the place of the replica that it came
        to know first: servers that take turns do not all begin with the same one."""
        self.plan = plan
        self.busy_seconds = 0.0  # on requests
        self.requests = 0  # under way
        self.routing = routing
        self._board, self._heard = board, np.zeros_like(board.numbers)
        self._free_at = 0.0
        self._sending = sending
        self._candidates = [*board.replicas[first:], *board.replicas[:first]]

    def take(self, request: SimulatedRequest, now: float) -> float:
        """When a request that arrives now is routed."""
        seconds = self.plan.request_seconds + self.plan.token_seconds * request.tokens
        self.requests += 1
        self.busy_seconds += seconds
        self._free_at = max(self._free_at, now) + seconds / (1 - min(self._sending.at(now), BUSIEST))
        return self._free_at

    def choose(self, request: SimulatedRequest) -> Route:
        self._hear()
        return self.routing.choose(RouteRequest(request.tokens, request.runs, request.session), self._candidates)

    def _hear(self) -> None:
        """Of the reports since it looked last: of several of a replica the last one, twice, for what was promised
        before the one before is in it."""
        board = self._board
        missed = board.numbers - self._heard
        for place in np.flatnonzero(missed).tolist():
            for _ in range(min(int(missed[place]), 2)):
                self.routing.told(board.replicas[place], board.loads[place])
        self._heard = board.numbers.copy()
