"""The server's own metrics, read from /metrics in Prometheus' text format."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "pilotfish_"


@dataclass(frozen=True, slots=True)
class ScrapedMetrics:
    """The sum of all series of each name at one moment."""

    values: Mapping[str, float]

    @classmethod
    def read(cls, http_address: str) -> ScrapedMetrics:
        """Read the metrics of the server at `host:port`."""
        with urllib.request.urlopen(f"http://{http_address}/metrics", timeout=10) as answer:
            return cls.parse(answer.read().decode())

    @classmethod
    def parse(cls, text: str) -> ScrapedMetrics:
        """Parse Prometheus' text format."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return cls(found)

    def total(self, name: str) -> float:
        """Return the sum of all series of a name, which is given without the prefix; 0 where there are none yet."""
        return self.values.get(PREFIX + name, 0.0)
