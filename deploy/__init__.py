"""What runs Pilotfish for others: containers, Prometheus, Grafana, Kubernetes, Ray."""
