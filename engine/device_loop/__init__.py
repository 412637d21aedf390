"""Rounds of drafting and verification that a device runs without the host (CUDA graphs; plain torch in tests).

Owns the device slots of sequences, the rounds, their recorded graphs and the transfer of their results. Prompts,
preemption and text are handled by plain steps (`docs/adr/0025-mixed-batches.md`).
"""
