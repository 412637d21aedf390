"""Faster replacements for parts of a transformers model, each tested for equivalence before it stays.

It recognises modules by the shapes of their parts. It knows no model family by name, and no request.
"""
