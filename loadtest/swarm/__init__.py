"""Locust: its users, how many of them when, and its processes."""
