"""What a GPU makes of Pilotfish, in parts that do not need each other: `python -m benchmarks.cuda first-light`."""
