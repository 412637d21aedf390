"""What all benchmarks share: synthetic pairs, replayed drafts, turns, timing, the machine and the report."""
