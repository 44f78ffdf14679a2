"""What queries in observability/ may ask for: the metrics and labels of a server that has seen traffic."""

from __future__ import annotations

import re
from functools import cache

from prometheus_client.parser import text_string_to_metric_families as parse
from server_traffic import everything

from pilotfish.server.observe.metrics import ServerMetrics

METRIC = re.compile(r"\b(?:vllm:|pilotfish_|http_|process_)[a-z0-9_]+")
#: What follows `by (` or `on (`, or stands before `=` in a selector.
LABELS = re.compile(r"(?:by|on) \(([a-z_, ]+)\)|([a-z_]+)=~?\"")
#: Those that Prometheus itself adds to what it scrapes.
OF_SCRAPES = {"job", "instance"}


@cache
def labels_by_sample() -> dict[str, set[str]]:
    metrics = ServerMetrics("target")
    everything(metrics)
    found: dict[str, set[str]] = {}
    for family in parse(metrics.render()[0].decode()):
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
