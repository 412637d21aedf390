"""Trains an EAGLE-3 head for a target, on texts that the target generates and their hidden states.

Contains the text and features of a run, the head with its gradients, and the checkpoints of a run. It uses an engine
like any caller; serving code does not import it.
"""
