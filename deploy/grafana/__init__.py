"""Dashboards that are written in Python and stored as the JSON files that Grafana loads."""
