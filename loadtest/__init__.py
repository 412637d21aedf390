"""Loads a running server over the network and reports what became of it. Speaks the protocol only, as any caller."""
