"""Metric families of one registry: nothing here is global, so that one process can hold several servers."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Families:
    """Makes families whose samples all carry the same first labels."""

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        self._registry = registry
        self._names = tuple(labels)
        self.values = tuple(labels.values())

    def counter(self, name: str, documentation: str) -> Counter:
        return Counter(name, documentation, self._names, registry=self._registry).labels(*self.values)

    def counters(self, name: str, documentation: str, label: str, values: Sequence[str]) -> dict[str, Counter]:
        """One for each value of a label; all of them exist from the start, at 0."""
        family = self.counter_family(name, documentation, label)
        return {value: family.labels(*self.values, value) for value in values}

    def counter_family(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(name, documentation, (*self._names, *labels), registry=self._registry)

    def gauge(self, name: str, documentation: str) -> Gauge:
        return Gauge(name, documentation, self._names, registry=self._registry).labels(*self.values)

    def gauge_family(self, name: str, documentation: str, *labels: str) -> Gauge:
        return Gauge(name, documentation, (*self._names, *labels), registry=self._registry)

    def histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
        return self.histogram_family(name, documentation, buckets).labels(*self.values)

    def histogram_family(self, name: str, documentation: str, buckets: Sequence[float], *labels: str) -> Histogram:
        names = (*self._names, *labels)
        return Histogram(name, documentation, names, registry=self._registry, buckets=buckets)

    def info(self, name: str, documentation: str, *labels: str) -> Info:
        return Info(self.gauge_family(name, documentation, *labels), self.values)


class Info:
    """A gauge of constant 1 whose labels tell something that rarely changes."""

    def __init__(self, family: Gauge, labels: tuple[str, ...]) -> None:
        self._family, self._labels = family, labels
        self._told: tuple[str, ...] | None = None

    def set(self, *told: str) -> None:
        if told != self._told:
            self._family.clear()
            self._family.labels(*self._labels, *told).set(1)
            self._told = told


class Total:
    """Feeds a counter with a total that begins at 0 again when the process that counts does."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._last = 0

    def set(self, total: int) -> None:
        self._counter.inc(total - self._last if total >= self._last else total)
        self._last = total


def one_two_five(limit: int) -> list[float]:
    """1, 2, 5, 10, 20, 50 … up to `limit`."""
    steps = [digit * 10**power for power in range(len(str(limit))) for digit in (1, 2, 5)]
    return [float(step) for step in steps if step <= limit]
