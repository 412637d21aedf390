"""Experiments on one server: its curve, overload, and chaos with clients and parts that fail."""
