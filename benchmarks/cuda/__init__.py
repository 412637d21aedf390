"""Benchmarks of Pilotfish on a GPU, in independent parts: `python -m benchmarks.cuda first-light`."""
