import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pilotfish.errors import EngineError, InputError, ParameterError, TargetUnavailable
from pilotfish.printable import one_line, short

logger = logging.getLogger(__name__)

CLIENT_GONE = 499  # nginx's; only logs show it
MAX_LINE = 400
MAX_RETRY = 60  # seconds: an estimate further ahead is none

MESSAGES = "/v1/messages"  # paths of Anthropic's API begin so
#: Anthropic's status of a server that cannot serve now, and its names of errors.
OVERLOADED = 529
MESSAGE_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

encode = msgspec.json.encode
#: Names of a chat's fields in errors (patterns), and their names in the body that became the chat.
FieldNames = Sequence[tuple[str, str]]


class HttpError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(_short_line(message))
        self.status, self.kind, self.param, self.code = status, kind, param and _short_line(param), code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def message_status(self) -> int:
        return OVERLOADED if self.status == 503 else self.status

    def message_body(self, request_id: str) -> dict[str, Any]:
        kind = MESSAGE_KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(self)}, "request_id": request_id}

    def renamed(self, names: FieldNames) -> "HttpError":
        """The same error, about the fields of the body that became the chat. A message begins with the field."""
        if not names:
            return self
        message, param = str(self), self.param
        for pattern, own in names:
            message, param = re.sub(pattern, own, message), param and re.sub(pattern, own, param)
        return HttpError(self.status, message, self.kind, param, self.code, self.headers)


class ClientGone(Exception):  # noqa: N818  # not an error: an end
    pass


def _short_line(text: str) -> str:
    """Keeps both ends of a long line: they name the field and the allowed values."""
    line, half = one_line(text), MAX_LINE // 2
    return line if len(line) <= MAX_LINE else f"{line[:half]} … {line[-half:]}"


def bad(field: str, value: object, allowed: str) -> HttpError:
    return bad_request(field, f"{short(value)} is not allowed; expected {allowed}")


def bad_request(field: str, problem: str, code: str | None = None) -> HttpError:
    return HttpError(400, f"{field}: {problem}", param=field, code=code)


def retry_after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(min(seconds, MAX_RETRY))))}


def http_error(error: BaseException) -> HttpError:
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
