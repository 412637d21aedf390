"""Where the engine runs: on a thread or in a process of its own, supervised and restarted after a failure.

Owns the sockets and messages between the two processes. Knows no transport to callers.
"""
