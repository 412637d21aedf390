"""Layers that keep a state per sequence: recurrences and short convolutions over ragged batches, from state slots."""
