"""Tests that need a GPU: `make test-cuda`."""
