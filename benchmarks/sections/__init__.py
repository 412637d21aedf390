"""One question each; `python -m benchmarks` asks them."""
