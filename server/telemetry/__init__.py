"""Metrics, traces, logs and the event loop's lag. It only observes; it changes nothing."""
