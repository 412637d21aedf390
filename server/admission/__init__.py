"""From the request of a front end to a live one, for gRPC and HTTP alike.

Contains the check of requests, callers and their quotas, the compilation of structures, and the status of each error.
Knows no transport.
"""
