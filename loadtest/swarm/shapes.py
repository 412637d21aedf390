"""How many users there are, over the time of a run. Knows no Locust."""

from __future__ import annotations

from collections.abc import Callable

CALM = 0.2  # of all users, outside a spike
SPIKE = (0.4, 0.6)  # of the time


def ramp(moment: float) -> float:
    """More and more, up to all at two thirds of the time."""
    return min(1.0, 1.5 * moment)


def spike(moment: float) -> float:
    """Few, then all at once, then few."""
    return 1.0 if SPIKE[0] <= moment < SPIKE[1] else CALM


SHAPES: dict[str, Callable[[float], float]] = {"ramp": ramp, "spike": spike}


def share_of_users(scenario: str, moment: float) -> float:
    """Of all users, at this share of the time; a scenario without a shape has all of them throughout."""
    shape = SHAPES.get(scenario)
    return 1.0 if shape is None else shape(moment)
