"""Recurrent layers: recurrences and short convolutions over ragged batches, with state slots."""
