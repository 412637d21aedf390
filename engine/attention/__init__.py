"""Attention over the KV arena: one contract, several implementations, one registry."""

from engine.attention.registry import Attend, choose, fitting

__all__ = ["Attend", "choose", "fitting"]
