"""Matrices and matmuls: int8, int4, fp8 and packed floats, with rounding and kernel calls."""
