"""Experiments on a server: overload, chaos, the survival of its streams, and calls of the largest size."""
