"""Attention over the K/V arena: one interface, several implementations, one registry."""

from pilotfish.engine.attention.registry import Attend, choose, fitting

__all__ = ["Attend", "choose", "fitting"]
