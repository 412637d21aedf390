"""A request before it becomes sequences: its validation, and the defaults for fields that it leaves unset.

Uses the bounds of the config and the limits of the loaded models; independent of tensors and steps.
"""
