"""Architectures as data, and the decoder that runs them. Does not import transformers."""
