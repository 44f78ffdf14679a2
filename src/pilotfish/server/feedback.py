"""Feedback for a request that was served: only its own caller may give it, and once."""

from __future__ import annotations

import logging
from typing import Any

from pilotfish.logs import prompts_are_logged
from pilotfish.printable import short
from pilotfish.server.auth import Caller
from pilotfish.server.bodies.requests import FeedbackRequest
from pilotfish.server.http_errors import HttpError, bad_request
from pilotfish.server.observe.feedback_table import MAX_REQUESTS, SUCCESS, Feedback
from pilotfish.server.observe.request_records import checked_tag

logger = logging.getLogger(__name__)


def told(feedback: Feedback, caller: Caller, body: FeedbackRequest) -> dict[str, Any]:
    """The answer to feedback that was counted. HttpError 404 for an id that is none of the caller's, 409 for a second
    feedback."""
    score, request_id = _score(body), body.request_id
    category = None if body.category is None else checked_tag(body.category, "category")
    served = feedback.find(caller.name, request_id)
    if served is None:
        problem = f"{short(request_id)} is none of the last {MAX_REQUESTS} requests of this key"
        raise HttpError(404, f"request_id: {problem}", param="request_id", code="request_not_found")
    if served.told:
        problem = f"{short(request_id)} has feedback already, which stays"
        raise HttpError(409, f"request_id: {problem}", param="request_id", code="feedback_given")
    answer = {"category": feedback.tell(served, score, category), "mode": served.mode, "score": score}
    comment = {"comment": body.comment} if body.comment and prompts_are_logged() else {}
    logger.info("feedback", extra={"fields": {"about": request_id, **answer, **comment}})
    return {"object": "feedback", "request_id": request_id, **answer, "success": score >= SUCCESS}


def _score(body: FeedbackRequest) -> float:
    if (body.success is None) == (body.score is None):
        raise bad_request("success", "exactly one of success and score is needed")
    return float(bool(body.success) if body.score is None else body.score)
