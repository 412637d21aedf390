"""A request before it becomes sequences: its validation, and the defaults for fields that it leaves unset.

This package knows bounds and the limits of the loaded models, and no tensor and no step.
"""
