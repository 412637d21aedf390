"""Pilotfish on Ray Serve: the same protocol through Ray's gRPC proxy, many replicas behind it."""
