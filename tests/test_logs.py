"""Lines of a server's log: whose they are, what they say, and that nobody can forge one."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from contextlib import redirect_stderr
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from pilotfish import logs
from pilotfish.logs import JsonFormatter, TextFormatter, configure, log_access, log_prompt

HOSTILE = 'x\n{"level":"error"}\r\x1b[31m\x00\x7f\u2028\ud800 a=b "'


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    """Put the process's loggers back as they were."""
    root = logging.getLogger()
    others = [logging.getLogger(name) for name in (*logs.QUIET, "uvicorn.error", "uvicorn.access", "pilotfish.prompts")]
    before, level = root.handlers[:], root.level
    states = [(other, other.level, other.handlers[:], other.propagate, other.disabled) for other in others]
    root.handlers[:] = []  # pytest's own: `configure` would close them
    yield
    root.handlers[:] = before
    root.setLevel(level)
    for other, old_level, handlers, propagate, disabled in states:
        other.setLevel(old_level)
        other.handlers, other.propagate, other.disabled = handlers, propagate, disabled


def configured(form: str, **options: Any) -> io.StringIO:
    """What stderr is given once logs are configured so."""
    with redirect_stderr(io.StringIO()) as out:
        configure(form, **options)
    return out


def json_lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().split("\n")[:-1]]


def record(message: str, **fields: object) -> logging.LogRecord:
    one = logging.LogRecord("pilotfish.test", logging.INFO, "file", 1, "%s", (message,), None)
    one.fields = fields
    return one


def test_a_line_is_an_object_with_its_request() -> None:
    out = configured("json")
    logger = logging.getLogger("pilotfish.test")
    with logs.request_context("req-1", client="search"):
        logger.warning("half of %d", 4)
    logger.info("nobody's")
    logger.debug("not asked for")
    first, second = json_lines(out)
    assert first.pop("time").endswith("Z")
    expected = {"level": "warning", "logger": "pilotfish.test", "message": "half of 4"}
    assert first == expected | {"request_id": "req-1", "client": "search"}
    assert second["message"] == "nobody's" and "request_id" not in second


def test_requests_side_by_side_keep_their_ids() -> None:
    out = configured("json")

    async def request(name: str) -> None:
        with logs.request_context(name):
            for _ in range(3):
                await asyncio.sleep(0)
                logging.getLogger("pilotfish.test").info(name)

    async def both() -> None:
        await asyncio.gather(request("a"), request("b"))

    asyncio.run(both())
    lines = json_lines(out)
    assert [line["message"] for line in lines].count("a") == 3
    assert all(line["request_id"] == line["message"] for line in lines)


def test_lines_of_a_worker_say_whose_they_are() -> None:
    for form in ("json", "text"):
        out = configured(form, process="draft 0")
        logging.getLogger("pilotfish.test").info("hello")
        assert '"process": "draft 0"' in out.getvalue() or 'process="draft 0"' in out.getvalue()
    out = configured("json")
    logging.getLogger("pilotfish.test").info("hello")
    assert "process" not in json_lines(out)[0]


def test_the_access_line() -> None:
    out = configured("json")
    log_access("POST", "/v1/completions", 200, 12.34567, prompt_tokens=7, generation_tokens=3, finish_reason="stop")
    log_access("GET", "/nowhere", 404, 0.5)
    first, second = json_lines(out)
    assert first["message"] == "POST /v1/completions 200" and first["logger"] == "pilotfish.access"
    known = {"status": 200, "ms": 12.346, "generation_tokens": 3, "finish_reason": "stop"}
    assert first == first | known
    assert "prompt_tokens" not in second


def test_prompts_are_logged_where_asked_for_and_cut() -> None:
    out = configured("json", prompts=True)
    log_prompt("x" * (logs.MAX_PROMPT + 5))
    (line,) = json_lines(out)
    assert line["characters"] == logs.MAX_PROMPT + 5 and len(line["prompt"]) == logs.MAX_PROMPT
    out = configured("json", level=logging.DEBUG)
    log_prompt("secret")
    assert out.getvalue() == ""


@pytest.mark.parametrize("form", ["json", "text"])
def test_uvicorn_and_warnings_of_libraries_go_the_same_way(form: Any) -> None:
    uvicorn.Config("app", log_config=None, access_log=False)  # as the server has it
    out = configured(form)
    logging.getLogger("uvicorn.error").info("Application startup complete.")
    logging.getLogger("uvicorn.access").info("not said twice")
    logging.getLogger("urllib3").info("chatter")
    logging.getLogger("opentelemetry").warning("an export failed")
    assert out.getvalue().count("\n") == 2
    assert "startup complete" in out.getvalue() and "export failed" in out.getvalue()


def test_configuring_again_replaces() -> None:
    first = configured("json")
    second = configured("text")
    logging.getLogger("pilotfish.test").info("once")
    assert first.getvalue() == "" and second.getvalue().count("once") == 1


@given(st.text() | st.just(HOSTILE), st.text() | st.just(HOSTILE))
def test_nothing_breaks_out_of_its_line(message: str, value: str) -> None:
    for formatter in (JsonFormatter(), TextFormatter()):
        line = formatter.format(record(message, path=value))
        assert line.isprintable()
        line.encode()
    assert json.loads(JsonFormatter().format(record(message, path=value)))["path"] == value


def test_a_field_cannot_pose_as_another() -> None:
    line = TextFormatter().format(record("m", path='/x status=200) "', status=404))
    assert line.endswith(r'(path="/x status=200) \"" status=404)')


def test_a_traceback_cannot_forge_lines() -> None:
    """It is a field of a JSON line."""
    for form in ("text", "json"):
        out = configured(form)
        try:
            raise ValueError("bad\n2026-01-01T00:00:00Z INFO pilotfish.access: forged\x1b[2J")
        except ValueError:
            logging.getLogger("pilotfish.test").exception("failed")
        first, *rest = out.getvalue().split("\n")[:-1]
        assert all(line.startswith("  | ") and line.isprintable() for line in rest)
        assert bool(rest) == first.endswith("ERROR pilotfish.test: failed") == (form == "text")
    (line,) = json_lines(out)
    assert line["exception"].startswith("Traceback") and "ValueError: bad" in line["exception"]
