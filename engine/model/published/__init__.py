"""Checkpoints that others have quantised: codes are read as they were published, and no weight is rounded again."""
