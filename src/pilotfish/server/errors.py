"""Every answer that is no success: its status, and OpenAI's body."""

from __future__ import annotations

import logging
import math
import reprlib
from collections.abc import Mapping

from starlette.exceptions import HTTPException

from pilotfish.errors import EngineError, InputError, ParameterError, TargetUnavailable
from pilotfish.printable import one_line
from pilotfish.server.responses import ErrorBody, ErrorDetail

logger = logging.getLogger(__name__)

MAX_MESSAGE = 400
MAX_RETRY = 60  # seconds: an estimate further ahead is none

_repr = reprlib.Repr()  # neither deep nor long, whatever the value
_repr.maxstring = _repr.maxother = _repr.maxlong = 60
_repr.maxlevel = 2


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
        super().__init__(shortened(message))
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> ErrorBody:
        return ErrorBody(ErrorDetail(str(self), self.kind, self.param, self.code))


class ClientGone(Exception):  # noqa: N818  # not an error: an end
    """Nobody waits for the answer."""


def shortened(message: str) -> str:
    """One line; of a long one its two ends, where the field and what is allowed stand."""
    line = one_line(message)
    return line if len(line) <= MAX_MESSAGE else f"{line[: MAX_MESSAGE // 2]} … {line[-MAX_MESSAGE // 2 :]}"


def short(value: object) -> str:
    """A value as a message quotes it."""
    return _repr.repr(value)


def bad(field: str, value: object, allowed: str) -> HttpError:
    """400 for a value that is not allowed."""
    return bad_request(field, f"{short(value)} is not allowed; expected {allowed}")


def bad_request(field: str, problem: str, code: str | None = None) -> HttpError:
    """400 whose message begins with the field to blame."""
    return HttpError(400, f"{field}: {problem}", param=field, code=code)


def retry_after(seconds: float) -> dict[str, str]:
    """The header Retry-After of an estimate: whole seconds, 1 to MAX_RETRY."""
    return {"retry-after": str(max(1, math.ceil(min(seconds, MAX_RETRY))))}


def no_route(method: str, path: str, error: HTTPException) -> HttpError:
    """404 for a path that is not served, 405 for one that is by another method."""
    if error.status_code == 405:
        message = f"path: {method} {short(path)} is not allowed; expected {(error.headers or {}).get('Allow')}"
        return HttpError(405, message, code="method_not_supported", headers=error.headers)
    return HttpError(404, f"path: {method} {short(path)} is not served", code="unknown_url")


def http_error(error: Exception) -> HttpError:
    """The answer to a request that ended with `error`. An unforeseen one is logged."""
    match error:
        case HttpError():
            return error
        case InputError():
            return HttpError(400, str(error), param=error.field if isinstance(error, ParameterError) else None)
        case TargetUnavailable():
            return HttpError(503, str(error), "service_unavailable", headers=retry_after(error.retry_after))
        case HTTPException():
            return HttpError(error.status_code, error.detail, headers=error.headers)
        case EngineError():
            logger.error("%s", error)
            return HttpError(500, str(error), "internal_error")
    logger.error("a request ended with an error that nobody foresaw", exc_info=error)
    return HttpError(500, "internal error; the server's log says more", "internal_error")
