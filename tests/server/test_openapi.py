"""The OpenAPI document describes what is taken and given; the page's files are served."""

import json
from typing import Any

import pytest
from http_double import Client
from openapi_document import openapi

from pilotfish.config.server import ServerConfig
from pilotfish.errors import ParameterError
from pilotfish.server.routes import VERSION


def test_the_file_is_what_the_types_make(client: Client) -> None:
    """If not: python tests/server/openapi_document.py"""
    assert client.get("/openapi.json").json == json.loads(json.dumps(openapi(VERSION)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("port", 70000), ("max_n", 0), ("max_n", 129), ("max_body_bytes", True), ("max_queued_requests", -1)),
        *(("max_queued_tokens", 1 << 41), ("read_timeout", 0), ("write_timeout", 0), ("target_timeout", 1.9)),
        *(("request_timeout", float("nan")), ("metrics", "all"), ("tool_call_parser", "qwen3_xml")),
        *(("reasoning_parser", ""), ("host", ""), ("served_model_name", ("",))),
    ],
)
def test_a_configuration_that_cannot_be(field: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=field):
        ServerConfig(**{field: value})


@pytest.mark.parametrize("path", ["/", "/playground/page.js", "/playground/page.css", "/playground/icon.svg"])
def test_files_of_the_page(client: Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status == 200 and answer.body
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert answer.headers["cache-control"] == "no-cache" and answer.headers["x-content-type-options"] == "nosniff"
    assert client.get(path, if_none_match=answer.headers["etag"]).status == 304


@pytest.mark.parametrize("path", ["/playground", "/playground/", "/playground/none.js", "/playground/../routes.py"])
def test_other_paths_are_no_files_of_the_page(client: Client, path: str) -> None:
    assert client.get(path).error["code"] == "unknown_url"
