"""Metrics, traces, logs and the event loop's lag. Observes only."""
