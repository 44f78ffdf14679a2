"""What callers tell of the answers that they got, as a table: by category, with and without speculation.

admitted ─► remember ─► answered, with figures ─► tell, once ─► a row of the table, and metrics
            found by its ids and its caller alone
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pilotfish.config.fields import Mode

if TYPE_CHECKING:
    from pilotfish.server.observe.metrics import ServerMetrics

#: Of a request's speculation, or of a cascade's answer: the side that gave it, once that is known.
ServedMode: TypeAlias = Mode | Literal["cascade", "small", "large"]
#: Requests of one caller that are remembered, at least, and their ids.
MAX_REQUESTS = 4096
MAX_IDS = 2 * MAX_REQUESTS
#: A score from here on is a success.
SUCCESS = 0.5


@dataclass
class ServedRequest:
    """A request that feedback may come for."""

    tag: str | None
    mode: ServedMode
    tokens: int = 0  # of its outputs, so far
    steps: int = 0  # that gave them
    told: bool = False  # there was feedback
    scored: Callable[[float], None] = lambda _: None  # called with its score


@dataclass
class FeedbackRow:
    """Requests of one category and mode that feedback came for."""

    requests: int = 0
    successes: int = 0
    score: float = 0.0  # sum
    tokens: int = 0
    steps: int = 0

    def add(self, served: ServedRequest, score: float) -> None:
        self.requests += 1
        self.successes += score >= SUCCESS
        self.score += score
        self.tokens += served.tokens
        self.steps += served.steps

    def as_json(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "successes": self.successes,
            "success_rate": self.successes / self.requests,
            "mean_score": self.score / self.requests,
            "tokens_per_verify_step": self.tokens / self.steps if self.steps else None,
        }


class Feedback:
    """Remembers the newest requests of each caller, and counts what is told of them."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._requests: dict[str, OrderedDict[str, ServedRequest]] = {}  # by caller, then by id
        self._rows: dict[tuple[str, ServedMode], FeedbackRow] = {}  # by category and mode

    def remember(self, caller: str, ids: Iterable[str], served: ServedRequest) -> None:
        """Of two requests with one id the newer one is meant by it."""
        known = self._requests.setdefault(caller, OrderedDict())
        for each in ids:
            known[each] = served
            known.move_to_end(each)
        while len(known) > MAX_IDS:
            known.popitem(last=False)

    def find(self, caller: str, request_id: str) -> ServedRequest | None:
        """Of the caller's own requests."""
        known = self._requests.get(caller)
        return None if known is None else known.get(request_id)

    def tell(self, served: ServedRequest, score: float, category: str | None) -> str:
        """Count the feedback for a request that had none. Returns its category: the one given, or else the request's
        tag, as the table has it."""
        served.told = True
        served.scored(score)
        label = self._metrics.label(served.tag if category is None else category)
        self._rows.setdefault((label, served.mode), FeedbackRow()).add(served, score)
        outcome = "success" if score >= SUCCESS else "failure"
        self._metrics.feedback((label, served.mode), outcome, score, served.tokens, served.steps)
        return label

    def table(self) -> list[dict[str, Any]]:
        """A row for each category and mode, in order."""
        return [
            {"category": category, "mode": mode, **row.as_json()}
            for (category, mode), row in sorted(self._rows.items())
        ]
