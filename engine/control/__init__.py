"""How many drafts each sequence gets, chosen from measured costs and observed acceptance.

Owns the controllers (`controller`: fixed K; `adaptive`: AUTO), the model of step time, the acceptance model, the
speed-up estimate and the budget of prompt tokens per step. Uses numbers and the identities of sequences; no tensor, no
model and no clock.
"""
