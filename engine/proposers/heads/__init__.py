"""Proposers whose drafts come from heads on the target's hidden states (Medusa, EAGLE).

Owns the heads' checkpoints and their features by position. Knows no verification and no scheduler.
"""
