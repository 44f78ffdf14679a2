"""The metric families that `metrics.toml` declares."""

from __future__ import annotations

import tomllib
from operator import attrgetter
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

DECLARATIONS = Path(__file__).with_name("metrics.toml")
KINDS: dict[str, Any] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
ENGINE = "0"


class Metrics(dict[str | tuple[str, ...], Any]):
    """Those that are declared, by name, or by name and the values of their own labels, in a registry of their own: a
    process can hold several servers."""

    def __init__(self, model_name: str) -> None:
        super().__init__()
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.of_requests: list[tuple[str, bool, attrgetter[Any]]] = []  # name, whether it has labels, what it observes
        self._model_name = model_name
        self._families: dict[str, tuple[Any, tuple[str, ...]]] = {}  # with the values of the labels that all have
        declared = tomllib.loads(DECLARATIONS.read_text("utf-8"))
        buckets = declared.pop("buckets")
        for name, family in declared.items():
            self._declare(name, family, buckets)

    def __missing__(self, key: str | tuple[str, ...]) -> Any:
        name, *values = (key,) if isinstance(key, str) else key
        family, first = self._families[name]
        metric = self[key] = family.labels(*first, *values)
        return metric

    def empty(self, *names: str) -> None:
        """Leave no sample of these families."""
        for name in names:
            self._families[name][0].clear()
        self.clear()

    def _declare(self, name: str, family: dict[str, Any], buckets: dict[str, list[float]]) -> None:
        (kind,) = KINDS.keys() & family.keys()
        labels = family.get("labels", ())
        first = {} if name.startswith("http_") else {"model_name": self._model_name}
        first |= {"engine": ENGINE} if name.startswith("vllm:") else {}
        options = {"buckets": buckets[family["buckets"]]} if kind == "histogram" else {}
        made = KINDS[kind](name, family[kind], (*first, *labels), registry=self.registry, **options)
        self._families[name] = made, tuple(first.values())
        for key in [(name, value) for value in family.get("values", ())] if labels else [name]:
            self[key]  # there from the start
        if "record" in family:
            self.of_requests.append((name, bool(labels), attrgetter(family["record"])))
