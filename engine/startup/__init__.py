"""Builds a ready engine from a config: load, size, test, assemble, calibrate.

This package imports everything below it. No code that runs in a step imports it.
"""
