"""What Pilotfish costs and gains, measured against plain decoding in the same run."""
