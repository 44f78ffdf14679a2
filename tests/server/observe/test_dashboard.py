"""The Grafana dashboard: it asks only for metrics and labels that a server has, and its panels have their places."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from metric_queries import assert_asks_for_what_there_is, labels_by_sample
from prometheus_client.parser import text_string_to_metric_families as parse
from server_traffic import everything

from pilotfish.core.prefilling.handover_machine import OUTCOMES
from pilotfish.core.prefilling.prefill_pools import REFUSED
from pilotfish.server.observe.metrics import ServerMetrics

ROOT = Path(__file__).parents[3]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "observability" / "grafana.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
GRAPHS = [panel for panel in PANELS if panel["type"] != "row"]


def queries(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel["targets"]]


@pytest.mark.parametrize("panel", GRAPHS, ids=lambda panel: panel["title"])
def test_a_panel_asks_for_what_there_is(panel: dict[str, Any]) -> None:
    assert queries(panel)
    for query in queries(panel):
        assert_asks_for_what_there_is(query)


def test_variables_ask_for_what_there_is() -> None:
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\(([\w:]+), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
            assert label in labels_by_sample()[metric]


def test_queries_use_the_variables_that_there_are() -> None:
    known = {variable["name"] for variable in DASHBOARD["templating"]["list"]} | {"__rate_interval", "__range"}
    used = {name for panel in GRAPHS for query in queries(panel) for name in re.findall(r"\$(\w+)", query)}
    assert used <= known and {"model", "tag", "mode"} <= used


def test_panels_are_distinct_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    assert len({panel["title"] for panel in GRAPHS if panel["type"] == "timeseries"}) > 20
    for one, other in itertools.combinations([panel["gridPos"] for panel in PANELS], 2):
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert apart or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in PANELS)


def test_every_panel_says_what_it_shows() -> None:
    for panel in GRAPHS:
        assert panel["title"] and panel["description"].endswith(".")
        assert panel["datasource"]["uid"] == "${datasource}"


def test_the_documentation_names_every_metric() -> None:
    metrics = ServerMetrics("target")
    everything(metrics)
    text = (ROOT / "docs" / "metrics.md").read_text()
    families = {family.name for family in parse(metrics.render()[0].decode()) if not family.name.endswith("_created")}
    told = set(re.findall(r"`([a-z_:0-9]+)(?:\{[a-z_, ]*\})?`", text))
    for family in families:
        if not family.startswith("process_"):
            assert family in told or f"{family}_total" in told, family


@pytest.mark.parametrize(
    ("words", "section"),
    [(REFUSED, "| `reason` of a refusal |"), (OUTCOMES, "| `outcome` |")],
    ids=["reasons", "outcomes"],
)
def test_the_documentation_names_every_word_of_a_label(words: Iterable[str], section: str) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    table = text[text.index(section) :].split("\n\n")[0]
    assert set(words) <= set(re.findall(r"`([a-z_]+)`", table))
