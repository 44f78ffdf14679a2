"""Errors as answers, in OpenAI's shape."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from pilotfish.errors import EngineError, InputError, ParameterError, TargetUnavailable
from pilotfish.printable import one_line, short

logger = logging.getLogger(__name__)

MAX_LINE = 400
MAX_RETRY = 60  # seconds: an estimate further ahead is none

encode = msgspec.json.encode


class HttpError(Exception):
    """Ends a request with a status and one line."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`message` and `param`, in which a client's own names may stand, become short lines."""
        super().__init__(_short_line(message))
        self.status, self.kind, self.param, self.code = status, kind, param and _short_line(param), code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class ClientGone(Exception):  # noqa: N818  # not an error: an end
    """Nobody waits for the answer."""


def _short_line(text: str) -> str:
    """Of a long one the two ends: of a message they name the field and what is allowed."""
    line, half = one_line(text), MAX_LINE // 2
    return line if len(line) <= MAX_LINE else f"{line[:half]} … {line[-half:]}"


def bad(field: str, value: object, allowed: str) -> HttpError:
    """400 for a value that is not allowed."""
    return bad_request(field, f"{short(value)} is not allowed; expected {allowed}")


def bad_request(field: str, problem: str, code: str | None = None) -> HttpError:
    """400 whose message begins with the field to blame."""
    return HttpError(400, f"{field}: {problem}", param=field, code=code)


def retry_after(seconds: float) -> dict[str, str]:
    """The header Retry-After of an estimate: whole seconds, 1 to MAX_RETRY."""
    return {"retry-after": str(max(1, math.ceil(min(seconds, MAX_RETRY))))}


def http_error(error: BaseException) -> HttpError:
    """The answer to a request that ended with `error`. An unforeseen one is logged."""
    match error:
        case HttpError():
            return error
        case InputError():
            return HttpError(400, str(error), param=error.field if isinstance(error, ParameterError) else None)
        case TargetUnavailable():
            return HttpError(503, str(error), "service_unavailable", headers=retry_after(error.retry_after))
        case EngineError():
            logger.error("%s", error)
            return HttpError(500, str(error), "internal_error")
    logger.error("a request ended with an error that nobody foresaw", exc_info=error)
    return HttpError(500, "internal error; the server's log says more", "internal_error")
