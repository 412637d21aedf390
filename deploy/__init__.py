"""Ways to deploy Pilotfish: containers, Prometheus, Grafana, Kubernetes, Ray."""
