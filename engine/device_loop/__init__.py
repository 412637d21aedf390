"""Rounds of drafts and verification that a device runs without the host (CUDA graphs; plain torch in tests).

Owns the device slots of sequences, the rounds, their recorded graphs and their results on the way to the host. Knows
nothing of prompts, preemption or text: plain steps do all that (`docs/adr/0025-mixed-batches.md`).
"""
