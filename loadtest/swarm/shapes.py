"""The number of users over the time of a run. This module does not use Locust."""

from __future__ import annotations

from collections.abc import Callable

CALM = 0.2  # share of all users outside a spike
SPIKE = (0.4, 0.6)  # start and end, as shares of the time


def ramp(moment: float) -> float:
    """Increase linearly and reach all users at two thirds of the time."""
    return min(1.0, 1.5 * moment)


def spike(moment: float) -> float:
    """Start with few users, switch to all of them, then back to few."""
    return 1.0 if SPIKE[0] <= moment < SPIKE[1] else CALM


SHAPES: dict[str, Callable[[float], float]] = {"ramp": ramp, "spike": spike}


def share_of_users(scenario: str, moment: float) -> float:
    """Return the share of all users at this share of the time; a scenario without a shape always has all users."""
    shape = SHAPES.get(scenario)
    return 1.0 if shape is None else shape(moment)
