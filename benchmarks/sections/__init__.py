"""The sections of `python -m benchmarks`; each answers one question."""
