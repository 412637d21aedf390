"""Matrices and their products: int8, int4, fp8 and packed floats, each with its rounding and its kernel calls.

This package rounds weights and activations. It knows numbers and modules, and no model and no request.
"""
