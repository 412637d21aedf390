"""Shared code of all benchmarks: synthetic pairs, replayed drafts, turns, timing, machine data and the report."""
