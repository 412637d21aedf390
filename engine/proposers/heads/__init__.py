"""Proposers that draft with what was trained for one target: heads on its hidden states, or an adapter of it (Uno).

Owns the heads' checkpoints and their features by position. Knows no verification and no scheduler.
"""
