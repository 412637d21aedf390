"""From a message of the protocol to a live request and back, for gRPC and HTTP alike.

Owns validation of messages, callers and their quotas, compilation of structures, and the status of each error. Knows
no transport.
"""
