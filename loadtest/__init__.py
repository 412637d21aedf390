"""Load tests: sends requests to a running server over the network and reports the results. Uses only the protocol."""
