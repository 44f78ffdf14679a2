"""How many rows of its committed tokens each request has in a step."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from pilotfish.core.scheduling.request import Request


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
    order of arrival. Those that score a prompt count for what they cost, so that a step of them is no longer than
    others: of the requests that have such rows next only the first is sure of one."""

    def __init__(self, rows: int, requests: int, costs: RowCosts) -> None:
        self._costs = costs
        self._left = float(rows - requests)
        self._scores = False  # whether a request has taken rows that score

    def take(self, request: Request) -> int:
        count = self._costs.most(request, 1 + self._left) or int(not self._scores)
        self._scores |= bool(request.to_score(count))
        self._left = max(self._left + 1 - self._costs.of(request, count), 0.0)
        return count
