"""Runs once and turns a config into a ready engine: load, size, test, assemble, calibrate.

This package imports everything below it. No code that runs in a step imports it.
"""
