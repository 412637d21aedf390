"""Pilotfish on Ray Serve: many replicas behind Ray's gRPC proxy, with the same protocol."""
