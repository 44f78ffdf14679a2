"""Which waiting request is admitted next, and how many rows each running one has in a step."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, takewhile

from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS
from pilotfish.core.scheduling.request import Request

#: The first in the queue, of whom one may be admitted before the others, and how often that may happen to one of those.
CANDIDATES, MAX_PASSED_OVER = 16, 8


class WaitingRequests:
    """A queue in order of arrival. Of the first few the one with most KV in the cache comes next; the oldest, where
    that makes little difference, where it has come back, or was passed over often enough."""

    def __init__(self, num_known: Callable[[Request], int] | None) -> None:
        """`num_known`: tokens of a request whose KV it would find; None where nothing is kept."""
        self._num_known = num_known
        self._queue: deque[Request] = deque()
        self._next: Request | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    def add(self, request: Request) -> None:
        self._queue.append(request)

    def put_first(self, request: Request) -> None:
        self._queue.appendleft(request)
        self._next = None

    def next(self) -> Request:
        """The same one until it is taken or removed, or another is put first. The queue must not be empty."""
        self._next = self._next or self._choose()
        return self._next

    def take(self, request: Request) -> None:
        for other in takewhile(lambda other: other is not request, self._queue):
            other.passed_over += 1
        self.remove(request)

    def remove(self, request: Request) -> None:
        self._queue.remove(request)
        self._next = None

    def _choose(self) -> Request:
        oldest = self._queue[0]
        if self._num_known is None or oldest.stats.preemptions or oldest.passed_over == MAX_PASSED_OVER:
            return oldest
        known = {request: self._num_known(request) for request in islice(self._queue, CANDIDATES)}
        best = max(known, key=lambda request: known[request])
        return best if known[best] >= known[oldest] + OBJECT_TOKENS else oldest


@dataclass(frozen=True)
class RowCosts:
    """What rows cost, in rows whose logits nobody needs."""

    scored: float = 1.0  # one that scores a token of a prompt

    def of(self, request: Request, count: int) -> float:
        return count + (self.scored - 1) * len(request.to_score(count))

    def most(self, request: Request, room: float) -> int:
        most = min(request.num_pending, int(room))
        if not request.to_score(most):
            return most
        return bisect_right(range(1, most + 1), room, key=lambda count: self.of(request, count))


#: Of a model whose output embedding costs nothing.
PLAIN_COSTS = RowCosts()


class RowBudget:
    """The rows of a step: one for each request first, so that a long prompt delays nobody's next token, the rest in
    order of arrival. Rows that score a prompt count for their cost: of the requests that have such rows next only the
    first is sure of one."""

    def __init__(self, rows: int, requests: int, costs: RowCosts) -> None:
        self._costs = costs
        self._left = float(rows - requests)
        self._scores = False  # whether a request has taken rows that score

    def take(self, request: Request) -> int:
        count = self._costs.most(request, 1 + self._left) or int(not self._scores)
        self._scores |= bool(request.to_score(count))
        self._left = max(self._left + 1 - self._costs.of(request, count), 0.0)
        return count
