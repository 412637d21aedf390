"""A Prometheus histogram for values that arrive with every token: observing one takes a microsecond.

That of prometheus_client takes five to ten: it compares the value with one bucket after the other, and locks two
counters.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import INF, floatToGoString


class Series:
    """The observed values of one label. Only the event loop's thread observes; any thread may read."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # of the bucket below each bound, and of that above the last
        self._exemplars: dict[int, Exemplar] = {}  # the newest of each bucket
        self._sum = 0.0

    def observe(self, value: float, exemplar: Mapping[str, str] | None = None, *, times: int = 1) -> None:
        """Count a value as often as it was observed. `exemplar`: labels of one observation, in OpenMetrics only."""
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += times
        self._sum += value * times
        if exemplar is not None:
            self._exemplars[bucket] = Exemplar(dict(exemplar), value, time.time())

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Add the series to what is exported."""
        bounds = map(floatToGoString, (*self._bounds, INF))
        numbers = enumerate(zip(bounds, accumulate(self._counts), strict=True))
        rows = [
            (bound, number, self._exemplars[i]) if i in self._exemplars else (bound, number)
            for i, (bound, number) in numbers
        ]
        family.add_metric(labels, rows, self._sum)


class Histogram(Collector):
    """One series for each value of a label; without a label a single one, whose value is "".

    Args:
        bounds: upper ends of the buckets, ascending; the last bucket has none.
    """

    def __init__(
        self, registry: CollectorRegistry, name: str, about: str, bounds: Sequence[float], label: str | None = None,
        values: Sequence[str] = ("",),
    ) -> None:  # fmt: skip
        self._name, self._about, self._labels = name, about, () if label is None else (label,)
        self.series = {value: Series(bounds) for value in values}
        registry.register(self)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._about, labels=self._labels)
        for value, series in self.series.items():
            series.add_to(family, (value,) if self._labels else ())
        yield family
