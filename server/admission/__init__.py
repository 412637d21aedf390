"""Conversion of protocol messages to live requests and back, for gRPC and HTTP alike.

Contains the validation of messages, callers and their quotas, the compilation of structures, and the status of each
error. Knows no transport.
"""
