"""Predicts the performance of a server under load from measured step costs and a simulated clock."""
