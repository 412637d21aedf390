"""PromQL queries on the metrics of `server/telemetry/metrics.py`, for the instances that a dashboard selects."""

from __future__ import annotations

INSTANCE = 'instance=~"$instance"'
WINDOW = "$__rate_interval"  # Grafana chooses it from the scrape interval and the resolution of the panel


def series(name: str, **labels: str) -> str:
    """Return the selector of one metric family, filtered by labels."""
    wanted = ", ".join([INSTANCE, *(f'{key}="{value}"' for key, value in labels.items())])
    family = name if name.startswith("process_") else f"pilotfish_{name}"
    return f"{family}{{{wanted}}}"


def total(name: str, by: str = "", **labels: str) -> str:
    """Return the query of a gauge, summed over all instances."""
    return f"sum{_by(by)}({series(name, **labels)})"


def rate(name: str, by: str = "", **labels: str) -> str:
    """Return the query of a counter's growth per second, summed over all instances."""
    return f"sum{_by(by)}(rate({series(name, **labels)}[{WINDOW}]))"


def ratio(above: str, below: str, by: str = "") -> str:
    """Return the query of one counter's growth divided by another's. No point where the divisor did not grow."""
    return f"{rate(above, by)} / {'on() group_left() ' if by else ''}({rate(below)} > 0)"


def mean(name: str, by: str = "", **labels: str) -> str:
    """Return the query of the average of a histogram's observations."""
    return f"{rate(f'{name}_sum', by, **labels)} / ({rate(f'{name}_count', by, **labels)} > 0)"


def quantile(q: float, name: str, by: str = "", **labels: str) -> str:
    """Return the query of the quantile `q` of a histogram's observations."""
    groups = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{name}_bucket', groups, **labels)})"


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""
