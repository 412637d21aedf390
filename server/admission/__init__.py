"""Turns a front end's request into a live stream, for gRPC and HTTP alike.

Contains the validation of requests, callers and their quotas, the compilation of structures, and the status of each
error. Independent of the transport.
"""
