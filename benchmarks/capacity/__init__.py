"""Predictions of a server under load, from a table of measured step costs and a simulated clock."""
