"""Dashboards, written in Python and kept as the JSON that Grafana loads."""
