import logging
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pilotfish.logs import prompts_are_logged
from pilotfish.printable import short
from pilotfish.server.bodies.requests import FeedbackRequest
from pilotfish.server.http_errors import HttpError, bad_request
from pilotfish.server.observe.metrics import ServerMetrics
from pilotfish.server.observe.request_records import ServedMode, ServedRequest, checked_tag

logger = logging.getLogger(__name__)

#: Requests remembered for one caller, at least, and their ids.
MAX_REQUESTS = 4096
MAX_IDS = 2 * MAX_REQUESTS
SUCCESS = 0.5  # the lowest score that is a success


@dataclass
class FeedbackRow:
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
    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._requests: dict[str, OrderedDict[str, ServedRequest]] = {}  # by caller, then by id
        self._rows: dict[tuple[str, ServedMode], FeedbackRow] = {}  # by category and mode

    def remember(self, caller: str, ids: Iterable[str], served: ServedRequest) -> None:
        """Of two requests with one id the newer one is meant."""
        known = self._requests.setdefault(caller, OrderedDict())
        for each in ids:
            known[each] = served
            known.move_to_end(each)
        while len(known) > MAX_IDS:
            known.popitem(last=False)

    def add(self, caller: str, body: FeedbackRequest) -> dict[str, Any]:
        """HttpError 404 for an id that is none of the caller's, 409 for a second feedback."""
        if (body.success is None) == (body.score is None):
            raise bad_request("success", "exactly one of success and score is needed")
        score, request_id = float(bool(body.success) if body.score is None else body.score), body.request_id
        category = None if body.category is None else checked_tag(body.category, "category")
        served = self._requests.get(caller, OrderedDict()).get(request_id)
        if served is None:
            problem = f"{short(request_id)} is none of the last {MAX_REQUESTS} requests of this key"
            raise HttpError(404, f"request_id: {problem}", param="request_id", code="request_not_found")
        if served.told:
            problem = f"{short(request_id)} has feedback already, which stays"
            raise HttpError(409, f"request_id: {problem}", param="request_id", code="feedback_given")
        answer = {"category": self._count(served, score, category), "mode": served.mode, "score": score}
        comment = {"comment": body.comment} if body.comment and prompts_are_logged() else {}
        logger.info("feedback", extra={"fields": {"about": request_id, **answer, **comment}})
        return {"object": "feedback", "request_id": request_id, **answer, "success": score >= SUCCESS}

    def _count(self, served: ServedRequest, score: float, category: str | None) -> str:
        served.told = True
        served.scored(score)
        labels = (self._metrics.label(served.tag if category is None else category), served.mode)
        self._rows.setdefault(labels, FeedbackRow()).add(served, score)
        outcome = "success" if score >= SUCCESS else "failure"
        self._metrics["pilotfish_feedback", *labels, outcome].inc()
        self._metrics["pilotfish_feedback_score", *labels].inc(score)
        self._metrics["pilotfish_feedback_tokens", *labels].inc(served.tokens)
        self._metrics["pilotfish_feedback_steps", *labels].inc(served.steps)
        return labels[0]

    def table(self) -> list[dict[str, Any]]:
        rows = sorted(self._rows.items())
        return [{"category": category, "mode": mode, **row.as_json()} for (category, mode), row in rows]
