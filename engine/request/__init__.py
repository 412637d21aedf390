"""A request before it becomes sequences: its validation, and the defaults for fields that it leaves unset.

Knows bounds and the limits of the loaded models; knows no tensors and no steps.
"""
