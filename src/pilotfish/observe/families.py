"""Metric families of one registry, so that a process can hold several servers, and labels with a bounded number of
values, whatever clients send."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pilotfish.errors import ParameterError

#: Distinct tags of one server; requests with further ones count as OTHER.
MAX_TAGS = 32
NO_TAG = "none"
OTHER = "other"

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,63}")


class Families:
    """Makes families whose samples all carry the same first labels. `counters` and `histograms` give a function from
    the values of the further labels to a metric."""

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        self._registry = registry
        self._names = tuple(labels)
        self.values = tuple(labels.values())

    def counter(self, name: str, documentation: str) -> Counter:
        return self.counters(name, documentation)()

    def counters(self, name: str, documentation: str, *labels: str) -> Callable[..., Counter]:
        family = Counter(name, documentation, (*self._names, *labels), registry=self._registry)
        return partial(family.labels, *self.values)

    def gauge(self, name: str, documentation: str) -> Gauge:
        return self.gauge_family(name, documentation).labels(*self.values)

    def gauge_family(self, name: str, documentation: str, *labels: str) -> Gauge:
        return Gauge(name, documentation, (*self._names, *labels), registry=self._registry)

    def histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
        return self.histograms(name, documentation, buckets)()

    def histograms(
        self, name: str, documentation: str, buckets: Sequence[float], *labels: str
    ) -> Callable[..., Histogram]:
        names = (*self._names, *labels)
        family = Histogram(name, documentation, names, registry=self._registry, buckets=buckets)
        return partial(family.labels, *self.values)


class Total:
    """Feeds a counter with a total that begins at 0 again when the process that counts does."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._last = 0

    def set(self, total: int) -> None:
        self._counter.inc(total - self._last if total >= self._last else total)
        self._last = total


class Tags:
    """The first MAX_TAGS tags are labels of their own."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def label(self, tag: str | None) -> str:
        if tag is None:
            return NO_TAG
        if len(self._known) < MAX_TAGS:
            self._known.add(tag)
        return tag if tag in self._known else OTHER


def checked_tag(value: object, field: str = "metadata.tag") -> str:
    """The tag of a request; `field` is where it came from, for the error's message."""
    if isinstance(value, str) and _TAG.fullmatch(value):
        return value
    shown = value[:80] if isinstance(value, str) else value
    raise ParameterError(field, shown, "1 to 64 letters, digits and _ . : / -, a letter or digit first")


def status_label(status: int) -> str:
    """`2xx` of 200, as vLLM labels its http_requests_total."""
    return f"{status // 100}xx"
