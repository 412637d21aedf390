"""Metrics, traces, logs and the event loop's lag. Knows numbers and names; decides nothing."""
