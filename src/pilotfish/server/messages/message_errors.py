"""Errors as Anthropic's Messages API answers them."""

from __future__ import annotations

import re
from typing import Any

from pilotfish.server.http_errors import HttpError

#: Paths of the API begin so.
PREFIX = "/v1/messages"
#: Its status of a server that cannot serve now.
OVERLOADED = 529
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
#: Fields of the chat that a body means, and what the body calls them.
FIELDS = (
    (r"^(response_format|structured_outputs)\b", "output_config.format.schema"),
    (r"^(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
    (r"^(tools\[\d+\]|tool_choice)\.function", r"\1"),
    (r"^stop\b", "stop_sequences"),
)


def status_of(error: HttpError) -> int:
    return OVERLOADED if error.status == 503 else error.status


def body_of(error: HttpError, request_id: str) -> dict[str, Any]:
    """Also the event of an error that breaks a stream."""
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}, "request_id": request_id}


def as_asked(error: HttpError) -> HttpError:
    """The error, naming fields as the body does."""
    param = error.param and _named(error.param)
    return HttpError(error.status, _named(str(error)), error.kind, param, error.code, error.headers)


def _named(text: str) -> str:
    """A field, or a message that begins with one."""
    for chat, own in FIELDS:
        text = re.sub(chat, own, text)
    return text
