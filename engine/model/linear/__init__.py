"""Matrices and their products: int8, int4, fp8 and packed floats, each with its rounding and its kernel calls."""
