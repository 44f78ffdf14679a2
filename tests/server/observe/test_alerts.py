"""Alert rules for Prometheus: they ask only for what a server tells, and say who should do what."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from metric_queries import assert_asks_for_what_there_is

from pilotfish.operate.guarding.guard import GuardEvent
from pilotfish.server.traffic.canary import Verdict

ROOT = Path(__file__).parents[3]
OBSERVABILITY = ROOT / "observability"
GROUPS: list[dict[str, Any]] = yaml.safe_load((OBSERVABILITY / "alerts.yml").read_text())["groups"]
RULES: dict[str, dict[str, Any]] = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}


def test_prometheus_reads_them() -> None:
    config = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())
    assert [OBSERVABILITY / name for name in config["rule_files"]] == [OBSERVABILITY / "alerts.yml"]


def test_no_two_have_one_name() -> None:
    assert len(RULES) == sum(len(group["rules"]) for group in GROUPS) == 3


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_an_alert_asks_for_what_there_is(rule: dict[str, Any]) -> None:
    assert_asks_for_what_there_is(rule["expr"])


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_an_alert_says_where_it_is_and_what_to_read(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "page")
    assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
    (page,) = re.findall(r"docs/[a-z-]+\.md", rule["annotations"]["description"])
    assert (ROOT / page).exists()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_label_has_a_value_that_there_is(rule: dict[str, Any]) -> None:
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
