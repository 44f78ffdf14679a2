"""Logs on stderr, as JSON or text. Clients cannot break out of a line: both formats escape control characters. Prompts
are logged only with `--log-prompts`."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from pilotfish.errors import ParameterError
from pilotfish.printable import OneLineFormatter

#: Characters of one prompt in a line.
MAX_PROMPT = 10_000
#: Libraries that log every request, connection or cache at level INFO.
QUIET = ("httpx", "urllib3", "asyncio", "torch")

_access = logging.getLogger("pilotfish.access")
_prompts = logging.getLogger("pilotfish.prompts")
_prompts.disabled = True  # until `configure` is told otherwise
_process: dict[str, Any] = {}  # a worker's name, for each of its lines
_request: ContextVar[dict[str, Any]] = ContextVar("request", default={})  # noqa: B039  # never changed


@contextmanager
def request_context(request_id: str, client: str | None = None) -> Iterator[None]:
    """Lines logged within carry the request's id, and the name of its key."""
    token = _request.set({"request_id": request_id} | ({} if client is None else {"client": client}))
    try:
        yield
    finally:
        _request.reset(token)


def log_access(method: str, path: str, status: int, ms: float, **fields: Any) -> None:
    """`ms`: time since the request's arrival. The path has no query; None fields are left out."""
    own = {"method": method, "path": path, "status": status, "ms": round(ms, 3)}
    own |= {name: value for name, value in fields.items() if value is not None}
    _access.info("%s", f"{method} {path} {status}", extra={"fields": own})


def prompts_are_logged() -> bool:
    return not _prompts.disabled


def log_prompt(text: str) -> None:
    _prompts.info("prompt", extra={"fields": {"characters": len(text), "prompt": text[:MAX_PROMPT]}})


def configure(
    form: str | None,
    prompts: bool = False,
    level: int = logging.INFO,
    process: str | None = None,
) -> None:
    """Send all logs of this process to stderr, replacing earlier configurations. Lines carry the worker's name
    `process`; without a form they are `pilotfish NAME: message`. uvicorn needs log_config=None and access_log=False, as
    pilotfish.access says more. ParameterError for another form."""
    global _process
    plain = OneLineFormatter(f"pilotfish {(process or '').replace('%', '%%')}: %(message)s")
    formatters = {"json": JsonFormatter(), "text": TextFormatter(), None: plain}
    if form not in formatters:
        raise ParameterError("log_format", form, "json or text")
    _process = {} if process is None else {"process": process}
    handler = logging.StreamHandler()
    handler.setFormatter(formatters[form])
    logging.basicConfig(handlers=[handler], level=level, force=True)
    for name in QUIET:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    _prompts.disabled = not prompts


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    return {**_request.get(), **_process, **getattr(record, "fields", {})}


class JsonFormatter(logging.Formatter):
    """Fields: time (UTC), level, logger, message, then the line's own; ASCII only."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return as_json(line)


class TextFormatter(OneLineFormatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name
        head = f"{moment(record)} {record.levelname} {record.name}: {record.message}"
        fields = " ".join(f"{name}={shown(value)}" for name, value in fields_of(record).items())
        return f"{head} ({fields})" if fields else head


def moment(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def as_json(value: object) -> str:
    """Printable ASCII; json.dumps alone leaves DEL as it is."""
    return json.dumps(value, default=str).replace("\x7f", "\\u007f")


def shown(value: object) -> str:
    text = str(value)
    plain = text and all(c.isprintable() and c not in ' "=()\\' for c in text)
    return text if plain else as_json(text)
