"""PromQL over the metrics of `server/telemetry/metrics.py`, for the instances that a dashboard selects."""

from __future__ import annotations

INSTANCE = 'instance=~"$instance"'
WINDOW = "$__rate_interval"  # Grafana's: as short as the scrapes allow, as long as the resolution asks


def series(name: str, **labels: str) -> str:
    """One family, filtered."""
    wanted = ", ".join([INSTANCE, *(f'{key}="{value}"' for key, value in labels.items())])
    family = name if name.startswith("process_") else f"pilotfish_{name}"
    return f"{family}{{{wanted}}}"


def total(name: str, by: str = "", **labels: str) -> str:
    """A gauge, added over all instances."""
    return f"sum{_by(by)}({series(name, **labels)})"


def rate(name: str, by: str = "", **labels: str) -> str:
    """A counter's growth per second, added over all instances."""
    return f"sum{_by(by)}(rate({series(name, **labels)}[{WINDOW}]))"


def ratio(above: str, below: str, by: str = "") -> str:
    """One counter's growth over another's; no point where the other stood still."""
    return f"{rate(above, by)} / {'on() group_left() ' if by else ''}({rate(below)} > 0)"


def mean(name: str, by: str = "", **labels: str) -> str:
    """The average of a histogram's observations."""
    return f"{rate(f'{name}_sum', by, **labels)} / ({rate(f'{name}_count', by, **labels)} > 0)"


def quantile(q: float, name: str, by: str = "", **labels: str) -> str:
    """What a share `q` of a histogram's observations stay below."""
    groups = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{name}_bucket', groups, **labels)})"


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""
