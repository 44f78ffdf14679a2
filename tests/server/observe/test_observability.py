"""The Grafana dashboard and the alert rules: they ask only for metrics and labels of a server that has seen traffic."""

import itertools
import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families as parse
from server_traffic import everything

from pilotfish.core.prefilling.handover_machine import OUTCOMES
from pilotfish.core.prefilling.prefill_pools import REFUSED
from pilotfish.operate.guarding.guard import GuardEvent
from pilotfish.server.observe.metrics import ServerMetrics
from pilotfish.server.traffic.canary import Verdict

ROOT = Path(__file__).parents[3]
OBSERVABILITY = ROOT / "observability"
DASHBOARD: dict[str, Any] = json.loads((OBSERVABILITY / "grafana.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
GRAPHS = [panel for panel in PANELS if panel["type"] != "row"]
GROUPS: list[dict[str, Any]] = yaml.safe_load((OBSERVABILITY / "alerts.yml").read_text())["groups"]
RULES: dict[str, dict[str, Any]] = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
METRIC = re.compile(r"\b(?:vllm:|pilotfish_|http_|process_)[a-z0-9_]+")
#: What follows `by (` or `on (`, or stands before `=` in a selector.
LABELS = re.compile(r"(?:by|on) \(([a-z_, ]+)\)|([a-z_]+)=~?\"")
#: Those that Prometheus itself adds to what it scrapes.
OF_SCRAPES = {"job", "instance"}


@cache
def told_families() -> list[Any]:
    metrics = ServerMetrics("target")
    everything(metrics)
    return list(parse(metrics.render()[0].decode()))


@cache
def labels_by_sample() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for family in told_families():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def assert_asks_for_what_there_is(query: str) -> None:
    samples = labels_by_sample()
    asked = METRIC.findall(query)
    assert asked and set(asked) <= samples.keys()
    known = OF_SCRAPES.union(*(samples[name] for name in asked))
    labels = {name.strip() for found in LABELS.findall(query) for name in ",".join(found).split(",") if name.strip()}
    assert labels <= known
    assert all(query.count(a) == query.count(b) for a, b in ("()", "{}", "[]"))


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
    text = (ROOT / "docs" / "metrics.md").read_text()
    families = {family.name for family in told_families() if not family.name.endswith("_created")}
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


# -- alerts


def test_prometheus_reads_them() -> None:
    config = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())
    assert [OBSERVABILITY / name for name in config["rule_files"]] == [OBSERVABILITY / "alerts.yml"]
    assert len(RULES) == sum(len(group["rules"]) for group in GROUPS) == 3


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_an_alert_asks_for_what_there_is_and_says_where_it_is_and_what_to_read(rule: dict[str, Any]) -> None:
    assert_asks_for_what_there_is(rule["expr"])
    assert rule["labels"]["severity"] in ("warning", "page")
    assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
    (page,) = re.findall(r"docs/[a-z-]+\.md", rule["annotations"]["description"])
    assert (ROOT / page).exists()
    kinds, verdicts = get_args(get_type_hints(GuardEvent)["kind"]), get_args(Verdict)
    assert set(re.findall(r'kind="(\w+)"', rule["expr"])) <= set(kinds)
    assert set(re.findall(r'result="(\w+)"', rule["expr"])) <= set(verdicts)


def test_an_unequal_output_pages_in_float32_alone() -> None:
    rule = RULES["PilotfishCanaryUnequal"]
    assert 'cache_dtype="float32"' in rule["expr"]
    assert [name for name, other in RULES.items() if other["labels"]["severity"] == "page"] == [
        "PilotfishCanaryUnequal"
    ]
    assert "for" not in rule  # at once: the first one is one too many
