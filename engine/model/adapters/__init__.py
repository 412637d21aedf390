"""Low-rank adapters (LoRA) of a target: their files, the matmuls that they change, and which of them are loaded.

Each row of a pass may have another adapter. Rows without one keep the bits of a model that has no adapters.
"""
