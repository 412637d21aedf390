"""C code for operations that are slow in torch on a CPU, compiled when Pilotfish is built; torch is the fallback."""

from pilotfish.engine.native.compiled import instructions, library, threads_in_use
from pilotfish.engine.native.matmul import Matrix, PackedMatrices, PackedMatrix, multiplies
from pilotfish.engine.native.rows import Rows, rows_for
from pilotfish.engine.native.weights import ALIGNED, GroupedCodes

__all__ = [
    "ALIGNED", "GroupedCodes", "Matrix", "PackedMatrices", "PackedMatrix", "Rows", "instructions", "library",
    "multiplies", "rows_for", "threads_in_use",
]  # fmt: skip
