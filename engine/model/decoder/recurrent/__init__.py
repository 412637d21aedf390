"""Layers that keep a state of each sequence: what they compute, as data, and the modules that run it."""
