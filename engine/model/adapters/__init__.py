"""Low-rank adapters (LoRA) of a target: their files, the matmuls that they change, and the loaded ones.

Each row of a pass may have a different adapter. Rows without one have the same bits as without adapters.
"""
