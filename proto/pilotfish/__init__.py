"""Generated from `proto/pilotfish`: the protocol, and nothing else."""
