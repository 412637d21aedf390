"""Faster replacements for parts of a transformers model, each tested for equivalence before it stays.

Knows modules by the shapes of their parts, no family by name, and no request.
"""
