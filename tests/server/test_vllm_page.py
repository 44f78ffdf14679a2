"""docs/coming-from-vllm.md: its tables of parameters, routes and metrics say what the server does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_double import Client
from pages import codes, table

from pilotfish.server.observe.metrics import ServerMetrics

PAGE = "coming-from-vllm.md"
PARAMETERS = [codes(row[0])[0] for row in table(PAGE, "Parameters of requests")]
ROUTES = [(route, row[1]) for row in table(PAGE, "Routes") for route in codes(row[0])]
METRICS = [name for row in table(PAGE, "Metrics") for name in codes(row[1]) if "…" not in name]


@pytest.mark.parametrize("fields", PARAMETERS)
def test_parameters_on_the_page_are_taken(client: Client, fields: str) -> None:
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 4, **json.loads(f"{{{fields}}}")}
    assert client.post("/v1/completions", body).status == 200


@pytest.mark.parametrize(("route", "says"), ROUTES)
def test_routes_on_the_page_are_there_or_not(client: Client, route: str, says: str) -> None:
    method, path = route.replace("{name}", "tiny").split()
    status = (client.get(path) if method == "GET" else client.post(path, {})).status
    assert says.startswith("served") == (status != 404) and (status == 404) == (says == "404")


def test_metrics_on_the_page_are_served() -> None:
    text = ServerMetrics("tiny").render()[0].decode()
    assert METRICS and [name for name in METRICS if f"# TYPE {name} " not in text] == []
