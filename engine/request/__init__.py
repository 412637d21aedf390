"""A request before it is a sequence: what is valid, and the defaults of what it leaves open.

Knows bounds and the limits of the loaded models; knows no tensor and no step.
"""
