"""Locust load tests: user classes, the number of users over time, and the processes of Locust."""
