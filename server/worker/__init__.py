"""Execution of the engine in its own process, with supervision and restarts after a failure.

Contains the sockets and messages between the two processes. Independent of the transport to callers.
"""
