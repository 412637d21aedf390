"""A server's own account of itself, read from its /metrics. Knows Prometheus' text format."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "pilotfish_"
Series = tuple[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class ScrapedMetrics:
    """All series at one moment, or what was added to them between two."""

    values: Mapping[Series, float]

    @classmethod
    def read(cls, http_address: str) -> ScrapedMetrics:
        """Ask a server at `host:port` now."""
        url = f"http://{http_address}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return cls.parse(answer.read().decode())

    @classmethod
    def parse(cls, text: str) -> ScrapedMetrics:
        """From Prometheus' text format."""
        families = text_string_to_metric_families(text)
        samples = (sample for family in families for sample in family.samples)
        return cls({(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples})

    def since(self, before: ScrapedMetrics) -> ScrapedMetrics:
        """What was added; of use for counters and histograms."""
        return ScrapedMetrics({series: value - before.values.get(series, 0.0) for series, value in self.values.items()})

    def value(self, name: str, **labels: str) -> float:
        """One series, by its name without the prefix."""
        return self.values[PREFIX + name, frozenset(labels.items())]

    def total(self, name: str) -> float:
        """All series of this name together."""
        return sum(value for (found, _), value in self.values.items() if found == PREFIX + name)

    def histogram(self, name: str, **labels: str) -> dict[float, float]:
        """Observations up to each bound and above the one before. Bounds rise; the last is infinite."""
        wanted, counts = set(labels.items()), {}
        for (found, pairs), value in self.values.items():
            if found == f"{PREFIX}{name}_bucket" and wanted <= pairs:
                counts[float(dict(pairs)["le"])] = value
        bounds = sorted(counts)
        below = [0.0, *(counts[bound] for bound in bounds[:-1])]
        return {bound: counts[bound] - less for bound, less in zip(bounds, below, strict=True)}

    def mean(self, name: str, **labels: str) -> float:
        """Mean of a histogram's observations; 0 of none."""
        count = self.value(f"{name}_count", **labels)
        return self.value(f"{name}_sum", **labels) / count if count else 0.0
