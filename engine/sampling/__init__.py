"""Sampling: logits processors, distribution, noise, log-probabilities, and verification of ragged rows.

The two acceptance rules are in `engine/verify.py`; `verification` applies them to the rows of each sequence. Rows are
independent: nothing in this package depends on the batch, the scheduler or the model.
"""
