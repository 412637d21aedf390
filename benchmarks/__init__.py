"""Benchmarks of the costs and the speed-up of Pilotfish, relative to plain decoding in the same run."""
