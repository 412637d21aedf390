"""C code for operations that are slow in torch on a CPU, compiled when Pilotfish is built; torch is the fallback."""

from engine.native.compiled import instructions, library, threads_in_use
from engine.native.matmul import Matrix, PackedMatrices, PackedMatrix, multiplies
from engine.native.rows import Rows, rows_for
from engine.native.weights import ALIGNED, GroupedCodes

__all__ = [
    "ALIGNED", "GroupedCodes", "Matrix", "PackedMatrices", "PackedMatrix", "Rows", "instructions", "library",
    "multiplies", "rows_for", "threads_in_use",
]  # fmt: skip
