"""The server's own metrics, read from /metrics in Prometheus' text format."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "pilotfish_"
Series = tuple[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class ScrapedMetrics:
    """All series at one moment, or their increase between two moments."""

    values: Mapping[Series, float]

    @classmethod
    def read(cls, http_address: str) -> ScrapedMetrics:
        """Read the metrics of the server at `host:port`."""
        url = f"http://{http_address}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return cls.parse(answer.read().decode())

    @classmethod
    def parse(cls, text: str) -> ScrapedMetrics:
        """Parse Prometheus' text format."""
        families = text_string_to_metric_families(text)
        samples = (sample for family in families for sample in family.samples)
        return cls({(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples})

    def since(self, before: ScrapedMetrics) -> ScrapedMetrics:
        """Return the increase since `before`; useful for counters and histograms."""
        return ScrapedMetrics({series: value - before.values.get(series, 0.0) for series, value in self.values.items()})

    def value(self, name: str, **labels: str) -> float:
        """Return one series by its name without the prefix."""
        return self.values[PREFIX + name, frozenset(labels.items())]

    def total(self, name: str) -> float:
        """Return the sum of all series with this name."""
        return sum(value for (found, _), value in self.values.items() if found == PREFIX + name)

    def histogram(self, name: str, **labels: str) -> dict[float, float]:
        """Return the observations in each bucket, by upper bound. Bounds increase; the last one is infinite."""
        wanted, counts = set(labels.items()), {}
        for (found, pairs), value in self.values.items():
            if found == f"{PREFIX}{name}_bucket" and wanted <= pairs:
                counts[float(dict(pairs)["le"])] = value
        bounds = sorted(counts)
        below = [0.0, *(counts[bound] for bound in bounds[:-1])]
        return {bound: counts[bound] - less for bound, less in zip(bounds, below, strict=True)}

    def mean(self, name: str, **labels: str) -> float:
        """Return the mean of a histogram's observations; 0 without observations."""
        count = self.value(f"{name}_count", **labels)
        return self.value(f"{name}_sum", **labels) / count if count else 0.0
