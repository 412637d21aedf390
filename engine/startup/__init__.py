"""What runs once, between a config and an engine that is ready: load, size, test, assemble, calibrate.

Imports everything below it and is imported by no part of a step.
"""
