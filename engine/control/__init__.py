"""How many drafts each sequence gets, chosen from measured costs and observed acceptance.

Owns the controllers (`controller`: fixed K; `adaptive`: AUTO), the model of step time, the acceptance model, the
speed-up estimate and the budget of prompt tokens per step. Knows numbers, and of a sequence its identity; knows no
tensor, no model and no clock.
"""
