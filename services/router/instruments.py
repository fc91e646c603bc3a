"""Counters and histograms of one event loop, exported through prometheus-client.

Its own take a lock and several calls each time they count, which every request does a dozen times. Nobody counts in these from
another thread, so counting is an addition. What is exported is the same, line by line.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Count:
    """One series of a counter."""

    __slots__ = ("created_s", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.created_s = time.time()

    def inc(self, amount: float = 1) -> None:
        self.value += amount


class Spread:
    """One series of a histogram: how many values were at most each bound, and more than the bound before."""

    __slots__ = ("_bounds", "counts", "created_s", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: ascending, the last one is infinite."""
        self._bounds = bounds
        self.counts = [0] * len(bounds)
        self.sum = 0.0
        self.created_s = time.time()

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


S = TypeVar("S", Count, Spread)


class _Series(dict[tuple[str, ...], S]):
    """By the values of their labels; made when they are first asked for."""

    def __init__(self, name: str, labels: Sequence[str], make: Callable[[], S]) -> None:
        super().__init__()
        self._name, self._labels = name, tuple(labels)
        self._make: Callable[[], S] = make

    def __missing__(self, values: tuple[str, ...]) -> S:
        assert len(values) == len(self._labels), f"{self._name} has labels {self._labels}, got {values}"
        series = self[values] = self._make()
        return series


class _Family(Collector, Generic[S]):
    """A metric with its series `of` the values of their labels. Without labels it has one series, from the start."""

    def __init__(
        self, name: str, told: str, labels: Sequence[str], registry: CollectorRegistry, make: Callable[[], S]
    ) -> None:
        self._name, self._told, self._labels = name, told, tuple(labels)
        self.of: _Series[S] = _Series(name, labels, make)
        if not labels:
            self.of[()] = make()
        registry.register(self)

    def _each(self) -> Iterable[tuple[dict[str, str], S]]:
        return ((dict(zip(self._labels, values, strict=True)), s) for values, s in list(self.of.items()))


class Counter(_Family[Count]):
    """Only grows. `name` without `_total`."""

    def __init__(self, name: str, told: str, labels: Sequence[str] = (), *, registry: CollectorRegistry) -> None:
        super().__init__(name, told, labels, registry, Count)

    def inc(self, amount: float = 1) -> None:
        """Of a counter without labels."""
        self.of[()].value += amount

    def collect(self) -> Iterable[Metric]:
        metric = Metric(self._name, self._told, "counter")
        for labels, count in self._each():
            metric.add_sample(f"{self._name}_total", labels, count.value)
            metric.add_sample(f"{self._name}_created", labels, count.created_s)
        yield metric


class Histogram(_Family[Spread]):
    def __init__(
        self, name: str, told: str, labels: Sequence[str] = (), *, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        """`buckets`: their upper bounds, ascending; what is beyond the last one is counted too."""
        bounds = (*map(float, buckets), float("inf"))
        self._bounds = tuple(map(floatToGoString, bounds))
        super().__init__(name, told, labels, registry, lambda: Spread(bounds))

    def observe(self, value: float) -> None:
        """Of a histogram without labels."""
        self.of[()].observe(value)

    def collect(self) -> Iterable[Metric]:
        metric = Metric(self._name, self._told, "histogram")
        for labels, spread in self._each():
            for bound, count in zip(self._bounds, accumulate(spread.counts), strict=True):
                metric.add_sample(f"{self._name}_bucket", {**labels, "le": bound}, count)
            metric.add_sample(f"{self._name}_count", labels, sum(spread.counts))
            metric.add_sample(f"{self._name}_sum", labels, spread.sum)
            metric.add_sample(f"{self._name}_created", labels, spread.created_s)
        yield metric
