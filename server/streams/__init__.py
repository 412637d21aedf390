"""Outputs of a request between engine and reader. Handles tokens and text, independent of the protocol."""
