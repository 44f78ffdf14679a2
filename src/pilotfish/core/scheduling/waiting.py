"""Who is admitted next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice, takewhile

from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS
from pilotfish.core.scheduling.request import Request

#: The first in the queue, of whom one may be admitted before the others, and how often that may happen to one of those.
CANDIDATES, MAX_PASSED_OVER = 16, 8


class WaitingRequests:
    """A queue in order of arrival. Of the first few the one with most KV in the cache comes next, while that is there;
    the oldest, where that makes little difference, where it has come back, or was passed over often enough."""

    def __init__(self, num_known: Callable[[Request], int] | None) -> None:
        """`num_known` gives the tokens of a request whose KV it would find; None where nothing is kept."""
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
