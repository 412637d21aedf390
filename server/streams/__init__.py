"""Outputs of a request between the engine and the reader. Knows tokens and text, no protocol."""
