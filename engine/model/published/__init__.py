"""Published quantised checkpoints: codes are read without rounding any weight again."""
